"""Units and elements of large and many gradients, against plain float64 arithmetic; their counts.

Small tensors are copied side by side, large ones are read in place or in blocks: here are sizes on
both sides of each bound, and memory formats in which a unit is not contiguous.
"""

import math

import pytest
import torch
from torch import nn

from runner import apply_gradient_clipping
from runner.calibrate.calibrate import HIGHEST, LOWEST, Histogram, Tally
from runner.clip import Norms, build
from runner.clip.mode import scale_each
from runner.gradients import Layout
from tests.clip.reference import REFERENCE, adaptive, norm_of, on, unwaited
from tests.gradients.test_layout import Ranks, one_layout, shards, whole

LAST = torch.channels_last

# Shape, dimensions that index units, memory format of the gradient.
TENSORS = {
    "small vectors": ((64,), (), None),
    "other small vectors": ((64,), (), None),
    "rows": ((24, 700), (0,), None),
    "turned rows": ((700, 24), (1,), None),
    "long vector": ((100_003,), (), None),
    "long rows": ((3, 20_480), (0,), None),
    "long odd rows": ((3, 9_001), (0,), None),
    "filters": ((32, 40, 3, 3), (0,), None),
    "filters, channels last": ((32, 40, 3, 3), (0,), LAST),
    "transposed filters": ((40, 32, 3, 3), (1,), None),
    "transposed filters, channels last": ((40, 32, 3, 3), (1,), LAST),
    "experts": ((3, 50, 70), (0, 2), None),
    "many experts": ((40, 5, 70), (0, 2), None),
    "wide": ((2, 150_000), (1,), None),
    "small columns": ((6, 8), (1,), None),
    "elements": ((100, 100), (0, 1), None),
    "a few elements": ((30,), (0,), None),
    "other few elements": ((40,), (0,), None),
    "one column": ((40, 1), (1,), None),
    "one unit": ((100, 101), (), None),
    "left out small": ((5, 7), None, None),
    "left out large": ((90, 101), None, None),
}
DIMS = [dims for _, dims, _ in TENSORS.values()]
UNITS = {name: list(dims) for name, (_, dims, _) in TENSORS.items() if dims is not None}
OPTIONS = {"exclude": ["left out *"], "units": UNITS}


def filled(shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


def tensors(dtype=torch.float32, scale=1.0):
    """A module with parameters of the shapes above, each with a gradient."""
    model = nn.Module()
    for seed, (name, (shape, _, memory_format)) in enumerate(TENSORS.items()):
        parameter = nn.Parameter(filled(shape, seed).to(dtype))
        gradient = filled(shape, 100 + seed, scale).to(dtype)
        parameter.grad = gradient.contiguous(memory_format=memory_format or torch.contiguous_format)
        model.register_parameter(name, parameter)
    rows = model.get_parameter("rows")
    rows.data[3] = rows.grad[5] = 0
    return model


def clipped(model, mode, threshold, **options):
    layout = Layout.of_model(model)
    rule = build(mode, threshold=threshold, **options)
    rule.bind(layout)
    return rule.clip(layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("threshold", [0.02, 0.9, 1.08, 1e3])
def test_units_of_every_size_are_clipped_as_by_the_reference(dtype, threshold):
    """From thresholds that clip all units, over some units of each tensor, to none."""
    model = tensors(dtype)
    before = norm_of([p.grad for p in model.parameters()])
    expected, share, top = adaptive(model.parameters(), threshold, 2.0, dims=DIMS)
    outcome = clipped(model, "adaptive", threshold, **OPTIONS)
    exact = dtype is not torch.bfloat16
    rel = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.double(), gradient, rtol=rel, atol=0)
    assert outcome.fraction == pytest.approx(share, abs=0 if exact else 1e-4)
    assert outcome.max_stat == pytest.approx(top, rel=1e-6)
    assert outcome.norm == pytest.approx(before, rel=3e-7)
    assert outcome.norm_clipped == pytest.approx(norm_of(expected), rel=3e-7)


@pytest.mark.parametrize("mode", ["adaptive", "value"])
@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1.0, 1e18, 1e25])
def test_sizes_whose_squares_leave_float32(mode, scale):
    """Value clips half of the elements; the weights of adaptive clipping are as small or large."""
    model, threshold = tensors(scale=scale), 0.7 * scale
    before = [p.grad.double() for p in model.parameters()]
    options, dims = (OPTIONS, {"dims": DIMS}) if mode == "adaptive" else ({}, {})
    wanted, _, _ = REFERENCE[mode]([*model.parameters()], threshold, 2.0, **dims)
    outcome = clipped(model, mode, threshold, **options)
    assert outcome.norm == pytest.approx(norm_of(before), rel=1e-6)
    assert outcome.norm_clipped == pytest.approx(norm_of(wanted), rel=1e-6)
    if mode == "value":
        assert outcome.max_stat == max(float(g.abs().max()) for g in before)
        above = sum(int((g.abs() > float(torch.tensor(threshold))).sum()) for g in before)
        assert outcome.fraction == above / sum(g.numel() for g in before)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad.double(), gradient, rtol=2e-6, atol=0)


# -- elements


def test_narrow_types_round_neither_a_coefficient_nor_a_limit_beyond_them():
    parameter = nn.Parameter(torch.zeros(999, dtype=torch.float16))
    parameter.grad = torch.zeros_like(parameter)
    assert apply_gradient_clipping(parameter, "value", 1e6).fraction == 0.0
    parameter.grad = values = torch.linspace(0.1, 1.0, 999, dtype=torch.float16)
    wanted = (values.float() * 0.3337).half()
    scale_each(Layout.of_parameters([parameter]), torch.tensor([0.3337], dtype=torch.float64))
    assert torch.equal(parameter.grad, wanted)


def test_elements_next_to_the_threshold_are_counted_exactly():
    """λ is the largest element that is left alone, whatever the rounding of its square."""
    thresholds = torch.rand(2_000, generator=torch.Generator().manual_seed(0)) * 3 + 1e-3
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for threshold in thresholds[: 300 if dtype is torch.float32 else 30].to(dtype):
            at = threshold.item()
            above, below = (torch.nextafter(threshold, threshold * f) for f in (2, 0))
            parameter = nn.Parameter(torch.zeros(4, dtype=dtype))
            parameter.grad = torch.stack([threshold, -above, below, -threshold])
            outcome = apply_gradient_clipping(parameter, "value", at)
            assert outcome.fraction == 0.25
            assert outcome.max_stat == above.item()
            assert parameter.grad.tolist() == [at, -at, below.item(), -at]


# -- histograms


def tallied(layout, mode, steps=1, skip=0, kept=False):
    """The counts of each bin, and of everything."""
    clipper = build(mode, threshold=1e30, **({"exclude": ()} if mode == "adaptive" else {}))
    clipper.bind(layout)
    clipper.tally = Tally(skip)
    with on(kept):
        for _ in range(steps):
            norms = Norms.of(layout)
            with unwaited(kept):
                clipper.clip(layout, norms)
    return clipper.tally.gather(layout)


@pytest.mark.parametrize("mode", ["value", "adaptive"])
def test_the_share_above_a_threshold_is_the_fraction_that_it_clips(mode):
    found = tallied(Layout.of_model(tensors()), mode)
    assert tallied(Layout.of_model(tensors()), mode, kept=True) == found
    for threshold in (0.25, 1.0, 4.0):
        observed = clipped(tensors(), mode, threshold).fraction
        share = Histogram(*found, LOWEST, HIGHEST).share_above(threshold)
        assert share == pytest.approx(observed, abs=0.01)


def test_the_steps_of_a_warm_up_are_not_counted():
    layout = Layout.of_model(tensors())
    assert tallied(layout, "value", steps=3, skip=2) == tallied(layout, "value")
    bins, total = tallied(layout, "value", steps=2, skip=2)
    assert total == 0
    assert math.isnan(Histogram(bins, total, LOWEST, HIGHEST).largest(0.5))


def test_a_step_that_is_not_finite_is_not_counted():
    tally = Tally()
    tally.add(torch.tensor([1.0, math.nan, math.inf]), 1.0)
    tally.end_step(torch.tensor(math.nan))
    assert tally.gather(Layout([]))[1] == 0.0
    tally.add(torch.tensor([1.0, 0.0]), 0.5)
    tally.end_step(torch.tensor(1.0))
    bins, total = tally.gather(Layout([]))
    assert (sum(bins), total) == (0.5, 1.0)


def test_without_steps_all_counts_are_zero():
    bins, total = Tally().gather(Layout([]))
    assert not any(bins)
    assert total == 0.0


@pytest.mark.parametrize("mode", ["value", "adaptive", "per_parameter"])
def test_ranks_count_what_one_process_counts(mode):
    counts, total = tallied(one_layout(whole()), mode)
    for found in Ranks(2).run(lambda ranks: tallied(Layout(shards(whole(), ranks), ranks), mode)):
        assert found[0] == pytest.approx(counts, abs=1e-12)
        assert found[1] == pytest.approx(total, rel=1e-12)
    assert sum(counts) == pytest.approx(total)
