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
from tests.clip.reference import on, refused
from tests.on_device import Waits

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}
MODES = {"none": None, "norm": 0.5, "value": 0.1, "adaptive": 0.05}


def steps(kind, mode, factors, nonfinite="skip", kept=False, **options):
    """Metrics, which steps were taken, weights and waits after a step for each of ``factors``."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    booster = Booster(nonfinite=nonfinite)
    made = OPTIMIZERS[kind](module.parameters(), **options)
    model, optimizer, *_ = booster.boost(module, made)
    clipper = build(mode, threshold=MODES[mode])
    clipper.bind(optimizer.layout)
    outcomes, taken, waits = [], [], []
    with on(kept):
        for number, factor in enumerate(factors, 1):
            inputs = torch.arange(12.0, dtype=torch.float64).view(3, 4).sin() * number
            booster.backward(model(inputs).square().sum() * factor, optimizer)
            with Waits() as waiting:
                decision = optimizer.clip(clipper)
                optimizer.step()
            waits.append(waiting.found)
            outcomes += map(float, decision.metrics)
            taken.append(optimizer.was_taken())
            optimizer.zero_grad()
    return outcomes, taken, [p.detach().clone() for p in module.parameters()], waits


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, "norm") for kind in OPTIMIZERS]
    + [("adamw", "value"), ("momentum", "adaptive"), ("sgd", "none")],
)
def test_skipped_steps_leave_the_optimizer_as_a_host_that_reads_the_norm_does(kind, mode):
    """Also where the first step is skipped: fused SGD has no momentum buffers before it."""
    for first in (1.0, math.nan):
        factors = (first, 1.0, math.inf, -2.0, math.nan, 1.0)
        read, kept = steps(kind, mode, factors), steps(kind, mode, factors, kept=True, fused=True)
        assert kept[0] == pytest.approx(read[0], rel=1e-9, nan_ok=True)
        assert kept[1] == read[1] == [math.isfinite(factor) for factor in factors]
        for ours, wanted in zip(kept[2], read[2], strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-12)
        # Momentum buffers need a first step that is taken for certain.
        assert not any(kept[3][2 if math.isnan(first) else 1 :])
        assert any("norms.py" in line for line in read[3][1]) or mode != "norm"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_not_finite_can_be_ignored_or_an_error(mode, fused):
    given = ("adamw", mode, (1.0, math.nan))
    read, kept = steps(*given, "ignore"), steps(*given, "ignore", kept=True, fused=fused)
    error = lambda: steps(*given, "error", kept=True, fused=fused)  # noqa: E731
    refused(NonFiniteGradient, "nan: 0.weight", error)
    assert kept[0] == pytest.approx(read[0], rel=1e-9, nan_ok=True)
    assert kept[1] == read[1] == [True, True]
    assert all(bool(weight.isnan().all()) for weight in (*kept[2], *read[2]))


def test_the_schedule_stands_still_when_the_device_skips_a_step():
    """It moves once a step that was taken, also after the last one."""
    inputs = torch.ones(5, 4)
    inputs[2] = math.nan
    data = TensorPairs(inputs, torch.zeros(5, dtype=torch.long))
    for kept in (False, True):
        module, loader = nn.Linear(4, 2), DataLoader(data, collate_fn=collate_pairs)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0, fused=True)
        halved = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        trainer = Trainer(module, loader, "1ep", [], None, optimizer, halved)
        with on(kept):
            summary = trainer.fit()
        assert (summary["grad/nonfinite"], summary["final"]["train/lr"]) == (1, 0.5**3)
        assert optimizer.param_groups[0]["lr"] == 0.5**4
