"""What another threshold would have clipped: the figure each mode compares, and its shares."""

import copy
import math

import pytest
import torch
from torch import nn

from runner.clip import Decision, Layout, apply_gradient_clipping, build
from runner.telemetry.meter import Meter
from runner.telemetry.step import StepMetrics
from tests.train.test_trainer import fit, parts

MODES = {"norm": 0.3, "value": 0.02, "adaptive": 0.05}


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ConvTranspose2d(3, 4, 2), nn.Linear(5, 6))
    for parameter in made.parameters():
        parameter.grad = torch.randn_like(parameter) * 0.1
    nn.init.zeros_(made[0].bias)
    return made


def unit_ratios(parameter, dims):
    gradient, weight = parameter.grad.double(), parameter.detach().double()
    length = gradient.pow(2).sum(dims).sqrt()
    return length / weight.pow(2).sum(dims).sqrt().clamp(min=1e-3)


def expected_peak(mode: str, made: nn.Module) -> float:
    parameters = list(made.parameters())
    if mode == "value":
        return max(p.grad.abs().max().item() for p in parameters)
    if mode != "adaptive":
        return math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in parameters))
    # The head's weight is left out; the transposed convolution keeps its outputs in dimension 1.
    units = [
        unit_ratios(made[0].weight, (1, 2, 3)),
        unit_ratios(made[1].weight, (0, 2, 3)),
        *(unit_ratios(layer.bias, (0,)) for layer in made),
    ]
    return max(ratio.max().item() for ratio in units)


@pytest.mark.parametrize("threshold", [1e-4, 1e4])
@pytest.mark.parametrize("mode", ["none", "norm", "value", "adaptive"])
def test_the_peak_is_what_the_mode_compares_whether_or_not_it_clips(mode, threshold):
    made = model()
    wanted = expected_peak(mode, made)
    clipper = build(mode, threshold=None if mode == "none" else threshold)
    layout = Layout.of_model(made)
    clipper.bind(layout)
    outcome = clipper.clip(layout)
    assert outcome.max_stat == pytest.approx(wanted, rel=2e-6)


@pytest.mark.parametrize("mode", list(MODES))
def test_a_threshold_clips_exactly_when_it_is_below_the_peak(mode):
    peak = apply_gradient_clipping(model(), mode, 1e9).max_stat
    for threshold, clips in ((peak, 0), (peak * 1.0001, 0), (peak * 0.9999, 1)):
        assert apply_gradient_clipping(model(), mode, threshold).clipped == clips


def test_an_unclipped_run_counts_norms():
    every, _ = fit(*parts(), clip=None)
    norms = [row["grad/norm"] for row in every]
    threshold = sorted(norms)[5]
    _, summary = fit(*parts(), clip=None, what_if=[threshold])
    above = sum(norm > threshold for norm in norms)
    assert summary[f"clip/what_if/{threshold}"] == above / len(norms) == 9 / 15


@pytest.mark.parametrize("mode", list(MODES))
def test_shares_in_rows_and_summary(mode):
    """The threshold in force is predicted to clip what it does clip, at every step."""
    threshold = MODES[mode]
    asked = [threshold, 1e-9, 1e9]
    rows, summary = fit(*parts(), clip=(mode, threshold), what_if=asked, log_interval=2)
    keys = [f"clip/what_if/{x}" for x in asked]
    for row in rows:
        assert row[keys[1]] == 1.0
        assert row[keys[2]] == 0.0
        assert row[keys[0]] == row["clip/ratio_total"]
    assert [summary[key] for key in keys] == [rows[-1][key] for key in keys]
    assert [summary["final"][key] for key in keys] == [rows[-1][key] for key in keys]


@pytest.mark.parametrize("mode", list(MODES))
def test_looking_changes_nothing_that_is_trained(mode):
    clip = (mode, MODES[mode])
    plain, _ = fit(*parts(), clip=clip)
    looked, _ = fit(*parts(), clip=clip, what_if=[0.1, 0.25, 1.0, 2.0])
    assert [row["train/loss"] for row in looked] == [row["train/loss"] for row in plain]
    assert not any(key.startswith("clip/what_if") for row in plain for key in row)


def test_skipped_steps_count_as_steps_that_no_threshold_clipped():
    model_, loader = parts(bad=9)
    rows, summary = fit(model_, loader, "1ep", clip=None, what_if=[1e-9])
    assert [row["clip/what_if/1e-09"] for row in rows] == [1.0, 0.5, 2 / 3, 0.75, 0.8]
    assert summary["clip/what_if/1e-09"] == 0.8
    assert summary["clip/peak"]["max"] == summary["grad/norm"]["max"]


def test_an_infinite_peak_of_a_step_that_a_device_skipped_is_not_counted():
    meter = Meter(what_if=(1.0,), flush_every=1)
    outcome = Decision(math.inf, math.nan, 0.0, 1.0, 1.0, math.inf, 1.0)
    meter.push(StepMetrics(1, 1.0, outcome, 0.1, 8, 0, 0.5))
    assert meter.summary()["clip/what_if/1.0"] == 0.0


def test_the_peak_of_a_model_without_units_is_zero():
    made = nn.Sequential(nn.Linear(3, 2, bias=False))
    made[0].weight.grad = torch.randn(2, 3)
    before = copy.deepcopy(made[0].weight.grad)
    outcome = apply_gradient_clipping(made, "adaptive", 1e-6)
    assert (outcome.max_stat, outcome.clipped) == (0.0, 0.0)
    assert torch.equal(made[0].weight.grad, before)
