"""Clipping by metrics that stay on an accelerator is clipping by metrics that the host reads.

CPU tensors stand in for an accelerator's (``tests/on_device.py``).
"""

import copy
import math

import pytest
import torch
from torch import nn

from runner.clip import Layout, apply_gradient_clipping, build
from runner.clip.norms import norms
from tests.clip.test_modes import awkward, elements, parameters
from tests.on_device import kept_on_device

MODES = {"none": None, "norm": 0.9, "value": 0.7, "adaptive": 0.3}
EXACT = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def both(made, mode, threshold, norm_type=2.0):
    """Outcomes, and copies of ``made`` with clipped gradients: read by the host, and kept."""
    found = []
    for keep in (False, True):
        mine = copy.deepcopy(made)
        for copied, given in zip(mine, made, strict=True):
            copied.grad = None if given.grad is None else given.grad.clone()
        layout = Layout.of_parameters(mine)
        clipper = build(mode, threshold=threshold, norm_type=norm_type)
        clipper.bind(layout)
        if keep:
            with kept_on_device():
                outcome = clipper.clip(layout)
            assert isinstance(outcome.norm, torch.Tensor)
        else:
            outcome = clipper.clip(layout)
            assert all(type(metric) is float for metric in outcome.metrics[:6])
        found.append((tuple(map(float, outcome.metrics)), mine))
    return found


@pytest.mark.parametrize("scale", [1.0, 1e-6])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode, dtype, norm_type, scale):
    """Where it clips, and, on a gradient of a millionth, where it does not."""
    made = parameters(dtype=dtype, scale=scale)
    if dtype is torch.float32 and scale == 1.0:
        made += awkward()
    (read, host), (kept, device) = both(made, mode, MODES[mode], norm_type)
    assert (read[3] == 1.0) == (mode != "none" and scale == 1.0)
    rel = 1e-12 if dtype is torch.float64 else 2e-6
    assert kept == pytest.approx(read, rel=rel, nan_ok=True)
    assert kept[3:5] == read[3:5]
    for ours, wanted in zip(device, host, strict=True):
        if wanted.grad is None:
            assert ours.grad is None
        else:
            torch.testing.assert_close(ours.grad, wanted.grad, rtol=EXACT[ours.dtype], atol=0)


@pytest.mark.parametrize("mode", ["norm", "value", "adaptive"])
def test_nothing_is_clipped_at_a_threshold_that_is_reached_exactly(mode):
    weight = nn.Parameter(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    weight.grad = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    for kept in both([weight], mode, 3.0):
        outcome, (parameter,) = kept
        assert outcome == (3.0, 3.0, 1.0, 0.0, 0.0, 3.0, 3.0)
        assert torch.equal(parameter.grad, weight.grad)


def test_a_count_beyond_the_integers_of_float32_is_exact():
    parameter = nn.Parameter(torch.empty(2**24 + 1))
    parameter.grad = torch.ones(2**24 + 1)
    with kept_on_device():
        outcome = apply_gradient_clipping(parameter, "value", 0.5)
    assert float(outcome.fraction) == 1.0


@pytest.mark.parametrize("size", [1e19, 1e25])
def test_squares_of_a_unit_may_leave_the_range_of_float32(size):
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.grad = torch.full((3, 4), size)
    parameter.grad[2] = 0.5
    for outcome, (clipped,) in both([parameter], "adaptive", 0.5):
        assert elements(clipped.grad) == pytest.approx([0.5] * 12, rel=1e-6)
        assert outcome[4] == 2 / 3
        assert outcome[5] == pytest.approx(size, rel=1e-6)


def test_the_norms_of_all_parameters_are_on_the_host():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].weight.grad = torch.randn(2, 3)
    model[1].bias.grad = torch.randn(2)
    layout = Layout.of_model(model)
    for norm_type in (1.0, 2.0, math.inf):
        with kept_on_device():
            kept = norms(layout, norm_type)
        assert all(type(norm) is float for norm in kept.values())
        assert kept == pytest.approx(norms(layout, norm_type), rel=1e-6)
        assert kept["0.weight"] > 0
        assert kept["0.bias"] == 0


@pytest.mark.parametrize("mode", ["none", "norm", "value", "adaptive"])
def test_no_gradient_at_all(mode):
    layout = Layout.of_model(nn.Linear(2, 2))
    clipper = build(mode, threshold=MODES[mode])
    clipper.bind(layout)
    with kept_on_device():
        outcome = clipper.clip(layout)
    assert tuple(map(float, outcome.metrics[:6])) == (0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
