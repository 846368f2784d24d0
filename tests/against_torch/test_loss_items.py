"""Steps under class weights, label smoothing, sums and class probabilities are those of PyTorch.

The reference takes ``criterion(model(inputs), targets)`` of the whole batch in one process.
"""

from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner import Booster, GradientClipping, Trainer
from runner.booster import SinglePlugin
from runner.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    PipelineParallelPlugin,
    TensorParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from runner.data.dataset import TensorPairs
from runner.models.mixture import MixtureGPT
from tests.distributed.training import Rows
from tests.ranks import run_ranks

SAMPLES, HELD_OUT, BATCH, STEPS, CLASSES = 22, 7, 12, 4, 5
"""The second batch of an epoch is a short one, of 10 samples."""
THRESHOLD = 0.6
WEIGHT = torch.tensor([0.05, 4.0, 0.7, 1.5, 0.0], dtype=torch.float64)
IGNORED = -100

PLAN = {"0": "colwise", "2": "rowwise"}
PLUGINS = {
    "single": (1, SinglePlugin),
    "ddp": (2, TorchDDPPlugin),
    "fsdp": (2, TorchFSDPPlugin),
    "zero1": (2, partial(LowLevelZeroPlugin, stage=1)),
    "zero2": (2, partial(LowLevelZeroPlugin, stage=2)),
    "zero3": (2, partial(LowLevelZeroPlugin, stage=3)),
    "tensor": (2, partial(TensorParallelPlugin, tp_plan=PLAN)),
    "pipeline": (2, partial(PipelineParallelPlugin, num_microbatches=2)),
    "hybrid": (4, partial(HybridParallelPlugin, pp_size=2, num_microbatches=2)),
    "moe": (2, MoeHybridParallelPlugin),
}
"""Ranks, and what makes the plugin."""


class ByHand(nn.Module):
    """A weighted mean that only its own method tells the divisor of."""

    def forward(self, outputs, targets):
        each = F.cross_entropy(outputs, targets, reduction="none") * WEIGHT[targets]
        return each.sum() / WEIGHT[targets].sum()

    def loss_items(self, targets):
        return WEIGHT[targets].sum()


CRITERIA = {
    "weight": lambda: nn.CrossEntropyLoss(weight=WEIGHT),
    "smoothing": lambda: nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2, label_smoothing=0.2),
    "function": lambda: partial(F.cross_entropy, weight=WEIGHT, ignore_index=2),
    "sum": lambda: nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"),
    "nll": lambda: nn.NLLLoss(weight=WEIGHT),
    "probabilities": lambda: nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
    "pos_weight": lambda: nn.BCEWithLogitsLoss(pos_weight=WEIGHT + 0.1),
    "by_hand": ByHand,
}
CASES = [*((name, 1) for name in CRITERIA), *((name, 3) for name in CRITERIA)]


def model(criterion):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers, *([nn.LogSoftmax(1)] if criterion == "nll" else [])).double()


class ClassesFirst(MixtureGPT):
    """Logits [B, classes, T], as PyTorch's criteria take them."""

    def forward(self, inputs):
        return super().forward(inputs).transpose(1, 2)


def mixture(criterion):
    torch.manual_seed(0)
    shape = {"vocabulary": CLASSES, "context": 6, "layers": 1, "heads": 2, "width": 8}
    return ClassesFirst(**shape, dropout=0.0, tied=False, bias=True, experts=4, top_k=2).double()


def samples(criterion, count, seed, sequences):
    """Inputs and targets; rare and heavy classes are at the end, so that microbatches differ."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 6) if sequences else (count,)
    classes = torch.randint(CLASSES, shape, generator=generator).sort(0).values
    inputs = torch.randn(count, 6, dtype=torch.float64, generator=generator)
    if sequences:
        inputs = torch.randint(CLASSES, shape, generator=generator)
    if criterion in ("probabilities", "pos_weight"):
        dims = (count, CLASSES, 6) if sequences else (count, CLASSES)
        noise = torch.randn(dims, dtype=torch.float64, generator=generator)
        return inputs, noise.softmax(1)
    if criterion == "smoothing":
        classes[: count // 2] = 2
    if criterion == "weight":
        classes[::5] = IGNORED
    return inputs, classes


def by_torch(criterion, make, sequences):
    """Weights, and of each step loss, norm and whether it was clipped, in one process."""
    network, loss_of = make(criterion), CRITERIA[criterion]()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05, weight_decay=0.5)
    inputs, targets = samples(criterion, SAMPLES, 1, sequences)
    steps = []
    for number in range(STEPS):
        at = slice(BATCH) if number % 2 == 0 else slice(BATCH, None)
        loss = loss_of(network(inputs[at]), targets[at])
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in network.parameters()]).norm()
        for parameter in network.parameters():
            parameter.grad *= min(1.0, THRESHOLD / float(norm))
        optimizer.step()
        optimizer.zero_grad()
        steps.append((float(loss.detach()), float(norm), float(norm) > THRESHOLD))
    inputs, targets = samples(criterion, HELD_OUT, 2, sequences)
    with torch.no_grad():
        unseen = float(loss_of(network(inputs), targets))
    return dict(network.named_parameters()), steps, unseen


@cache
def reference(criterion, moe):
    return by_torch(criterion, mixture if moe else model, moe)


def by_trainer(plugin, cases):
    """The same by the Trainer under ``plugin``, for each of ``cases`` (criterion, accumulation)."""
    moe = plugin == "moe"
    found = []
    for criterion, accumulation in cases:
        spread = PLUGINS[plugin][1]()
        network = (mixture if moe else model)(criterion)
        batch = BATCH // spread.data_size // accumulation
        rows = Rows()
        trainer = Trainer(
            network,
            spread.prepare_dataloader(TensorPairs(*samples(criterion, SAMPLES, 1, moe)), batch),
            f"{STEPS}ba",
            GradientClipping("norm", THRESHOLD),
            spread.prepare_dataloader(TensorPairs(*samples(criterion, HELD_OUT, 2, moe)), 2),
            torch.optim.AdamW(network.parameters(), lr=0.05, weight_decay=0.5),
            criterion=CRITERIA[criterion](),
            plugin=spread,
            accumulation_steps=accumulation,
            eval_interval=f"{STEPS}ba",
            sinks=[rows],
        )
        trainer.fit()
        found.append((trainer.booster.state_dict(trainer.model), rows.rows))
    return found


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.product(every=2)
def test_steps_of_the_trainer_are_those_of_torch(plugin):
    ranks, _ = PLUGINS[plugin]
    cases = CASES
    if plugin == "moe":  # A criterion for each way to count is enough where a step is slow.
        cases = [case for case in CASES if case[0] in ("weight", "sum", "probabilities")]
    if ranks == 1:
        everywhere = [by_trainer(plugin, cases)]
    else:
        everywhere = run_ranks(by_trainer, ranks, plugin, cases)
    for number, (criterion, accumulation) in enumerate(cases):
        wanted, steps, unseen = reference(criterion, plugin == "moe")
        case = f"{criterion} x{accumulation}"
        weights, _ = everywhere[0][number]
        assert weights.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                weights[name], tensor.detach(), rtol=1e-9, atol=1e-11, msg=f"{case}: {name}"
            )
        if criterion == "sum":  # Its mean is logged for the held-out data.
            unseen /= float(WEIGHT[samples(criterion, HELD_OUT, 2, plugin == "moe")[1]].sum())
        for results in everywhere:
            _, rows = results[number]
            for row, (loss, norm, clipped) in zip(rows, steps, strict=True):
                assert row["train/loss"] == pytest.approx(loss, rel=1e-9), case
                assert row["grad/norm"] == pytest.approx(norm, rel=1e-9), case
                assert row["clip/fraction"] == clipped, case
            assert rows[-1]["eval/loss"] == pytest.approx(unseen, rel=1e-9), case
    if plugin == "single":
        clipped = [step[2] for name in CRITERIA for step in reference(name, False)[1]]
        assert any(clipped)
        assert not all(clipped)


# -- loops by hand over stages


def by_stages(criterion):
    """The same steps by ``booster.execute_pipeline``, and what a batch without samples does."""
    network = model(criterion)
    booster = Booster(plugin=PipelineParallelPlugin(num_microbatches=3))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05, weight_decay=0.5)
    wrapped, optimizer, loss_of, *_ = booster.boost(network, optimizer, CRITERIA[criterion]())
    inputs, targets = samples(criterion, SAMPLES, 1, False)
    steps, empty = [], None
    for number in range(STEPS):
        at = slice(BATCH) if number % 2 == 0 else slice(BATCH, None)
        batch = iter([(inputs[at], targets[at])])
        told = booster.execute_pipeline(batch, wrapped, loss_of, optimizer)
        if number == 0:
            none = iter([(inputs[:0], targets[:0])] * 2)
            empty = booster.execute_pipeline(none, wrapped, loss_of, optimizer)["loss"]
            unseen = booster.execute_pipeline(none, wrapped, loss_of)["loss"]
            empty = None if empty is None else (float(empty), float(unseen))
        norm = optimizer.clip_grad_by_norm(max_norm=THRESHOLD)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((None if told["loss"] is None else float(told["loss"]), float(norm)))
    message = ""
    try:
        booster.execute_pipeline(iter([{"x": inputs, "y": targets}]), wrapped, loss_of, optimizer)
    except TypeError as error:
        message = str(error)
    return booster.state_dict(wrapped), steps, empty, message


def all_by_stages(criteria):
    return [by_stages(criterion) for criterion in criteria]


def test_execute_pipeline_counts_items_and_takes_a_batch_without_samples():
    criteria = ["weight", "smoothing", "sum", "probabilities", "by_hand"]
    first, last = run_ranks(all_by_stages, 2, criteria)
    for number, criterion in enumerate(criteria):
        wanted, steps, _ = reference(criterion, False)
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                first[number][0][name], tensor.detach(), rtol=1e-9, atol=1e-11, msg=criterion
            )
        for (loss, norm), (expected, wanted_norm, _) in zip(last[number][1], steps, strict=True):
            assert loss == pytest.approx(expected, rel=1e-9), criterion
            assert norm == pytest.approx(wanted_norm, rel=1e-6), criterion
        assert last[number][2] == (0.0, 0.0)
        for rank in (first, last):
            assert "a dict with the keys 'x', 'y'" in rank[number][3]
            assert "collate_fn" in rank[number][3]
