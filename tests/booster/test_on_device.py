"""A fused optimizer that decides on the device whether a step is taken, without the host.

CPU tensors stand in for an accelerator's (``tests/on_device.py``); torch's fused CPU kernels read
the same ``found_inf``.
"""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runner import Trainer
from runner.booster import Booster, NonFiniteGradient
from runner.clip import build
from runner.data.dataset import TensorPairs, collate_pairs
from tests.on_device import Waits, kept_on_device

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}
MODES = {"none": None, "norm": 0.5, "value": 0.1, "adaptive": 0.05}
BAD = (1.0, math.nan, math.inf, -math.inf)


def boosted(make, nonfinite="skip", **options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    booster = Booster(nonfinite=nonfinite)
    model, optimizer, *_ = booster.boost(module, make(module.parameters(), **options))
    return booster, model, optimizer


def steps(make, mode, factors, nonfinite="skip", **options):
    """Outcomes, which steps were taken, and the weights after one step for each of ``factors``."""
    booster, model, optimizer = boosted(make, nonfinite, **options)
    clipper = build(mode, threshold=MODES[mode])
    clipper.bind(optimizer.layout)
    outcomes, taken = [], []
    for number, factor in enumerate(factors, 1):
        inputs = torch.arange(12.0, dtype=torch.float64).view(3, 4).sin() * number
        booster.backward(model(inputs).square().sum() * factor, optimizer)
        outcomes.append(tuple(map(float, optimizer.clip(clipper).metrics)))
        optimizer.step()
        taken.append(optimizer.was_taken())
        optimizer.zero_grad()
    return outcomes, taken, [p.detach().clone() for p in model.unwrap().parameters()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first", [1.0, math.nan])
def test_skipped_steps_leave_the_optimizer_as_a_host_that_reads_the_norm_does(first, kind, mode):
    """Also where the first step is skipped: fused SGD has no momentum buffers before it."""
    factors = (first, 1.0, math.inf, -2.0, math.nan, 1.0)
    make = OPTIMIZERS[kind]
    read = steps(make, mode, factors)
    with kept_on_device():
        kept = steps(make, mode, factors, fused=True)
    for ours, wanted in zip(kept[0], read[0], strict=True):
        assert ours == pytest.approx(wanted, rel=1e-9, nan_ok=True)
    assert kept[1] == read[1] == [math.isfinite(factor) for factor in factors]
    for ours, wanted in zip(kept[2], read[2], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_not_finite_can_be_ignored_or_an_error(mode, fused):
    make = OPTIMIZERS["adamw"]
    read = steps(make, mode, (1.0, math.nan), "ignore")
    with kept_on_device():
        kept = steps(make, mode, (1.0, math.nan), "ignore", fused=fused)
        with pytest.raises(NonFiniteGradient, match=r"norm is nan: 0\.weight"):
            steps(make, mode, (1.0, math.nan), "error", fused=fused)
    for ours, wanted in zip(kept[0], read[0], strict=True):
        assert ours == pytest.approx(wanted, rel=1e-9, nan_ok=True)
    assert kept[1] == read[1] == [True, True]
    assert all(bool(weight.isnan().all()) for weight in (*kept[2], *read[2]))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_never_waits_for_the_device(mode, kind):
    booster, model, optimizer = boosted(OPTIMIZERS[kind], fused=True)
    clipper = build(mode, threshold=MODES[mode])
    clipper.bind(optimizer.layout)
    inputs = torch.ones(3, 4, dtype=torch.float64)
    with kept_on_device():
        for _ in range(2):
            booster.backward(model(inputs).square().sum(), optimizer)
            with Waits() as waits:
                optimizer.clip(clipper)
                optimizer.step()
            optimizer.zero_grad()
    # The first step may: momentum buffers need it to be taken for certain.
    assert not waits.found


def test_the_check_sees_a_host_that_waits():
    _, model, optimizer = boosted(OPTIMIZERS["sgd"])
    model(torch.ones(3, 4, dtype=torch.float64)).square().sum().backward()
    with Waits() as waits:
        optimizer.clip_grad_by_norm(0.5)
    assert any("_local_scalar_dense" in line and "norms.py" in line for line in waits.found)


def test_the_schedule_stands_still_when_the_device_skips_a_step():
    """It moves once a step that was taken, also after the last one, and in a second fit."""
    data = TensorPairs(torch.ones(5, 4), torch.zeros(5, dtype=torch.long))
    data.inputs[2] = math.nan
    rates = []
    for _ in range(2):
        torch.manual_seed(0)
        module = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0, fused=True)
        halved = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        trainer = Trainer(
            module, DataLoader(data, collate_fn=collate_pairs), "1ep", [], None, optimizer, halved
        )
        if rates:
            with kept_on_device():
                summary = trainer.fit()
        else:
            summary = trainer.fit()
        assert summary["grad/nonfinite"] == 1
        rates.append((summary["final"]["train/lr"], optimizer.param_groups[0]["lr"]))
        trainer.fit()
        assert optimizer.param_groups[0]["lr"] == rates[-1][1]
    assert rates == [(0.5**3, 0.5**4)] * 2


def test_the_norm_that_a_call_returns_is_a_float32_of_the_device():
    booster, model, optimizer = boosted(OPTIMIZERS["sgd"], fused=True)
    with kept_on_device():
        booster.backward(model(torch.ones(3, 4, dtype=torch.float64)).square().sum(), optimizer)
        norm = optimizer.clip_grad_by_norm(0.5)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
