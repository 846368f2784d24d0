"""Several optimizers, several models: one step, the same as plain PyTorch takes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from runner import Trainer
from runner.booster import Booster, SinglePlugin, TorchDDPPlugin, TorchFSDPPlugin
from runner.data.dataset import TensorPairs
from tests.against_torch import together
from tests.against_torch.together import assert_plain_steps
from tests.ranks import run_ranks

PAIRS = ["ddp", "fsdp", "zero1", "zero2", "zero3", "tensor", "1f1b", "zero_bubble"]
QUADS = ["hsdp", "tensor_dp", "hybrid", "hybrid_zero1", "hybrid_fsdp_tp", "hybrid_fsdp_pp"]
STEPS = 6


def test_two_optimizers_in_one_process():
    assert_plain_steps([None], 1, "tied", "sgd", False, STEPS)


def test_two_optimizers_over_two_ranks():
    assert_plain_steps(PAIRS, 2, "tied", "sgd", False, STEPS)


def test_two_optimizers_over_four_ranks():
    assert_plain_steps(QUADS, 4, "gpt", "sgd", False, STEPS)


def test_two_optimizers_with_experts():
    assert_plain_steps(["moe"], 2, "moe", "sgd", False, STEPS)


def test_muon_for_matrices_and_adamw_for_the_rest():
    assert_plain_steps([None], 1, "gpt", "muon", False, 20)
    assert_plain_steps(["ddp", "fsdp", "zero1"], 2, "gpt", "muon", False, 20, exact_muon=True)


def test_two_models_under_one_optimizer():
    assert_plain_steps([None], 1, "two", "adamw", False, STEPS)
    assert_plain_steps(
        ["ddp", "fsdp", "zero1", "zero2", "zero3", "tensor"], 2, "two", "adamw", False, STEPS
    )


def _train(optimizers, schedulers, model, plugin):
    generator = torch.Generator().manual_seed(3)
    data = TensorPairs(
        torch.randn(24, 5, generator=generator, dtype=torch.float64),
        torch.randint(4, (24,), generator=generator),
    )
    trainer = Trainer(
        model,
        plugin.prepare_dataloader(data, 8 // plugin.data_size),
        "6ba",
        optimizers=optimizers,
        schedulers=schedulers,
        plugin=plugin,
    )
    trainer.fit()
    return trainer.booster.state_dict(trainer.model)


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _made(model):
    first = SGD(model[0].parameters(), lr=0.3, momentum=0.9)
    second = AdamW(model[2].parameters(), lr=0.02, weight_decay=0.1)
    halving = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (first, second)]
    return [first, second], halving


def _trained(plugin):
    model = _network()
    optimizers, schedulers = _made(model)
    return _train(optimizers, schedulers, model, plugin())


def _over_ranks():
    return [_trained(TorchDDPPlugin), _trained(TorchFSDPPlugin)]


def test_the_trainer_steps_all_optimizers_and_all_schedulers():
    model = _network()
    optimizers, schedulers = _made(model)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(24, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (24,), generator=generator)
    for step in range(6):
        part = slice(step % 3 * 8, step % 3 * 8 + 8)
        F.cross_entropy(model(inputs[part]), targets[part]).backward()
        for each in (*optimizers, *schedulers):
            each.step()
        for each in optimizers:
            each.zero_grad()
    expected = model.state_dict()
    for found in [_trained(SinglePlugin), *run_ranks(_over_ranks, 2)[0]]:
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-12)


def test_one_decision_whether_the_step_is_finite():
    model = _network()
    optimizers, _ = _made(model)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    booster = Booster()
    boosted, optimizer, *_ = booster.boost(model, optimizers)
    booster.backward(boosted(torch.ones(2, 5, dtype=torch.float64)).sum(), optimizer)
    model[2].bias.grad[0] = float("nan")
    optimizer.clip_grad_by_norm(1.0)
    assert optimizer.step() is False
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_the_state_of_several_optimizers_is_saved_and_loaded():
    inputs = torch.ones(2, 5, dtype=torch.float64)

    def begin():
        model, booster = _network(), Booster()
        wrapped, optimizer, *_ = booster.boost(model, _made(model)[0])

        def step():
            booster.backward(wrapped(inputs).square().sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    whole, _, step = begin()
    step()
    step()
    first, optimizer, step = begin()
    step()
    state, weights = optimizer.state_dict(), first.state_dict()
    second, optimizer, step = begin()
    optimizer.load_state_dict(state)
    second.load_state_dict(weights)
    step()
    for name, weight in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], weight)
    with pytest.raises(RuntimeError, match=r"2 optimizers were boosted together: use \.optimizers"):
        optimizer.unwrap()
    with pytest.raises(ValueError, match="closure goes with one optimizer"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="state is that of 1 optimizers, but 2"):
        optimizer.load_state_dict({"optimizer": {}, "loss_scale": None})


def test_a_second_boost_says_what_to_write():
    model = _network()
    booster = Booster()
    boosted, *_ = booster.boost(model, SGD(model.parameters(), lr=1.0))
    for again in (model, boosted):
        with pytest.raises(ValueError, match=r"boosted already: .*\[first, second\]"):
            booster.boost(again, SGD(model.parameters(), lr=1.0))
    del boosted, again
    # A script that trains in phases makes a new Trainer for each.
    booster.boost(model, SGD(model.parameters(), lr=1.0))


def _boost_twice():
    said = []
    for name in ("ddp", "fsdp", "zero3", "tensor", "1f1b"):
        model = together.models("gpt")[0]
        booster = Booster(plugin=together.PLUGINS[name]())
        booster.boost(model, AdamW(model.parameters()))
        with pytest.raises(ValueError, match=r"boosted already: .*\[first, second\]") as error:
            booster.boost(model, AdamW(model.parameters()))
        said.append(str(error.value))
    return said


def test_a_second_boost_over_ranks():
    assert len(run_ranks(_boost_twice, 2)[1]) == 5


def test_two_models_that_share_a_parameter():
    first, second = _network(), _network()
    second[2].weight = first[2].weight
    with pytest.raises(ValueError, match=r"0\.2\.weight and 1\.2\.weight are one parameter of two"):
        Booster().boost([first, second], SGD(first.parameters(), lr=1.0))
