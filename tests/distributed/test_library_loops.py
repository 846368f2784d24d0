"""Loops of one's own under plugins: parameters given twice, stages by hand, Colossal-AI's loop."""

import math

import pytest
import torch
from torch import nn

from runner import CosineAnnealingLR
from runner.booster import Booster
from runner.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    PipelineParallelPlugin,
    SinglePlugin,
)
from runner.clip import Layout, apply_gradient_clipping, total_norm
from runner.data.dataset import TensorPairs
from runner.parallel.full_state_dict import gathered
from tests.distributed.by_hand import Loop, cross_entropy, unlike
from tests.distributed.odd_models import SHAPE, batch_for, make
from tests.ranks import run_ranks

# -- what is given to clipping


def graded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model(torch.randn(5, 4, dtype=torch.float64)).square().sum().backward()
    return model


def norm_of(model):
    return math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))


def test_a_single_tensor_a_list_a_generator_and_a_module_are_the_same():
    for given in (
        lambda m: m,
        lambda m: list(m.parameters()),
        lambda m: m.parameters(),
        lambda m: (p for p in m.parameters()),
        lambda m: [*m.parameters(), *m.parameters()],
    ):
        model = graded()
        norm = norm_of(model)
        outcome = apply_gradient_clipping(given(model), "norm", norm / 3)
        assert outcome.norm == pytest.approx(norm, rel=1e-12)
        assert norm_of(model) == pytest.approx(norm / 3, rel=1e-12)
    model = graded()
    first = next(model.parameters())
    others = [p.grad.clone() for p in model.parameters()][1:]
    norm = float(first.grad.norm())
    assert apply_gradient_clipping(first, "norm", norm / 3).norm == pytest.approx(norm, rel=1e-12)
    assert float(first.grad.norm()) == pytest.approx(norm / 3, rel=1e-12)
    kept = [p.grad for p in model.parameters()][1:]
    assert all(torch.equal(a, b) for a, b in zip(kept, others, strict=True))


def test_a_parameter_twice_in_the_optimizer():
    model = graded()
    norm = norm_of(model)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([*model.parameters(), model[0].weight], lr=1.0)
    _, optimizer, *_ = Booster().boost(model, optimizer)
    assert optimizer.clip_grad_by_norm(norm / 3).item() == pytest.approx(norm)
    assert norm_of(model) == pytest.approx(norm / 3, rel=1e-12)


def test_a_parameter_in_two_optimizers():
    model = graded()
    norm = norm_of(model)
    shared = model[0].weight
    wrappers = [
        Booster().boost(model, torch.optim.SGD(held, lr=1.0))[1]
        for held in ([shared, model[0].bias], [shared, *model[2].parameters()])
    ]
    # Each limits the norm of the whole gradient, so that the second finds nothing left to do.
    assert wrappers[0].clip_grad_by_norm(norm / 3).item() == pytest.approx(norm)
    once = [p.grad.clone() for p in model.parameters()]
    assert wrappers[1].clip_grad_by_norm(norm / 2).item() == pytest.approx(norm / 3)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), once, strict=True))
    assert norm_of(model) == pytest.approx(norm / 3, rel=1e-12)


def given_twice(plugins):
    """Norms of layouts in which parameters are met twice, under plugins that replace them."""
    norms = []
    for plugin in plugins:
        model = make("gpt")
        model.again = model.blocks[0]
        loop = Loop(plugin, model)
        loop.backward(*batch_for("gpt"))
        loop.optimizer.unscale()
        twice = Layout(loop.layout.shards * 2, loop.layout.group)
        norms.append((total_norm(loop.layout), total_norm(twice), len(loop.layout.shards)))
    return norms


def test_a_module_under_two_names_counts_once_under_plugins():
    alone = Loop(None, make("gpt"))
    alone.backward(*batch_for("gpt"))
    alone.optimizer.unscale()
    wanted = total_norm(alone.layout)
    for rank in run_ranks(given_twice, 2, ["fsdp", "tensor", "zero1"]):
        for norm, twice, shards in rank:
            assert norm == twice == pytest.approx(wanted, rel=1e-12)
            assert shards == len(alone.layout.shards)


# -- stages by hand


def by_stages(schedule, batch):
    """A step by execute_pipeline, then a forward pass alone."""
    inputs, targets = batch
    model = make("gpt")
    booster = Booster(plugin=PipelineParallelPlugin(schedule=schedule, num_microbatches=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped, optimizer, criterion, *_ = booster.boost(model, optimizer, cross_entropy)
    data = iter([(inputs, targets)] * 2)
    trained = booster.execute_pipeline(data, wrapped, criterion, optimizer, return_outputs=True)
    norm = optimizer.clip_grad_by_norm(max_norm=0.05).item()
    gradients = gathered(model, wrapped.renamed, lambda p: p.grad)
    optimizer.step()
    seen = booster.execute_pipeline(data, wrapped, criterion, return_outputs=True)
    with pytest.raises(StopIteration):
        booster.execute_pipeline(data, wrapped, criterion)
    quiet = booster.execute_pipeline(iter([batch]), wrapped, criterion, return_loss=False)
    assert quiet == {"loss": None, "outputs": None}
    return trained, norm, gradients, seen


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("samples", [12, 7])
def test_execute_pipeline_by_hand_is_one_process(schedule, samples):
    batch = tuple(half[:samples] for half in batch_for("gpt"))
    model = make("gpt")
    outputs = model(batch[0])
    loss = cross_entropy(outputs, batch[1])
    loss.backward()
    outputs = outputs.detach()
    outcome = apply_gradient_clipping(model, "norm", 0.05)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
        after = model(batch[0])
    wanted = {name: p.grad for name, p in model.named_parameters()}
    ranks = run_ranks(by_stages, 2, schedule, batch)
    # In the V of zero bubble the last stage is on the first rank.
    last = 0 if schedule == "zero_bubble" else 1
    assert unlike(ranks[0][2], wanted, 1e-9) == []
    for rank, (trained, norm, _, seen) in enumerate(ranks):
        assert norm == pytest.approx(outcome.norm, rel=1e-6)
        if rank != last:
            assert trained == seen == {"loss": None, "outputs": None}
            continue
        assert float(trained["loss"]) == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(trained["outputs"], outputs, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(seen["outputs"], after, rtol=1e-9, atol=1e-12)
        assert float(seen["loss"]) == pytest.approx(float(cross_entropy(after, batch[1])), rel=1e-9)


# -- Colossal-AI's loop ---------------------------------------------------------------------------

LOOPS = {
    "hybrid": (lambda: HybridParallelPlugin(tp_size=2, pp_size=1), "gpt"),
    "hybrid_stages": (lambda: HybridParallelPlugin(tp_size=1, pp_size=2), "gpt"),
    "zero1": (lambda: LowLevelZeroPlugin(stage=1), "gpt"),
    "zero2": (lambda: LowLevelZeroPlugin(stage=2), "gpt"),
    "moe": (lambda: MoeHybridParallelPlugin(ep_size=2, tp_size=1, pp_size=1), "moe"),
    "one": (SinglePlugin, "gpt"),
    "one_moe": (SinglePlugin, "moe"),
}


def colossal(name, by_value):
    """Two windows of two microbatches, as Colossal-AI's examples write it."""
    kind, model_name = LOOPS[name]
    plugin = kind()
    booster = Booster(plugin=plugin)
    model = make(model_name)
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randint(SHAPE["vocabulary"], (2, 24, 12), generator=generator)
    data = TensorPairs(drawn[0], drawn[1])
    loader = plugin.prepare_dataloader(data, batch_size=6 // plugin.data_size, shuffle=True, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = CosineAnnealingLR(optimizer, total_steps=4)
    model, optimizer, criterion, loader, scheduler = booster.boost(
        model, optimizer, cross_entropy, loader, scheduler
    )
    norms = []
    for number, (inputs, targets) in enumerate(loader, 1):
        final = number % 2 == 0

        def backward(pair):
            if model.pipeline is not None:
                booster.execute_pipeline(iter([pair]), model, criterion, optimizer)
            else:
                booster.backward(criterion(model(pair[0]), pair[1]), optimizer)

        if not final:
            with booster.no_sync(model, optimizer):
                backward((inputs, targets))
            continue
        backward((inputs, targets))
        if by_value:
            optimizer.clip_grad_by_value(clip_value=0.002)
        else:
            norms.append(optimizer.clip_grad_by_norm(max_norm=0.1).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return booster.state_dict(model), norms


def every_loop(names):
    return [colossal(name, by_value) for name in names for by_value in (False, True)]


def test_colossals_loop_under_its_plugins_is_one_process():
    names = [name for name in LOOPS if not name.startswith("one")]
    ranks = run_ranks(every_loop, 2, names)
    asked = [(name, by_value) for name in names for by_value in (False, True)]
    for number, (name, by_value) in enumerate(asked):
        weights, norms = colossal("one_moe" if name == "moe" else "one", by_value)
        assert unlike(ranks[0][number][0], weights, 1e-9) == [], (name, by_value)
        for rank in ranks:
            assert rank[number][1] == pytest.approx(norms, rel=1e-6)
            assert rank[number][1] == ranks[0][number][1]
        assert by_value or len(norms) == 2
