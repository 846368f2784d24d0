"""Units and elements of large and many gradients, against plain float64 arithmetic.

Small tensors are copied side by side, large ones are read in place or in blocks: here are sizes on
both sides of each bound, and memory formats in which a unit is not contiguous.
"""

import pytest
import torch
from torch import nn

from runner.clip import Layout, apply_gradient_clipping, build
from runner.clip.mode import scale_each
from tests.clip.reference import norm_of

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
}
OPTIONS = {"exclude": ["left out *"], "units": {n: list(d) for n, (_, d, _) in TENSORS.items()}}


def filled(shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


class Tensors(nn.Module):
    """Parameters of the shapes above, each with a gradient, and two that are left out."""

    def __init__(self, dtype=torch.float32, scale=1.0):
        super().__init__()
        shapes = {n: s for n, (s, _, _) in TENSORS.items()}
        shapes |= {"left out small": (5, 7), "left out large": (90, 101)}
        for seed, (name, shape) in enumerate(shapes.items()):
            parameter = nn.Parameter(filled(shape, seed).to(dtype))
            gradient = filled(shape, 100 + seed, scale).to(dtype)
            if TENSORS.get(name, (0, 0, None))[2] is not None:
                gradient = gradient.contiguous(memory_format=LAST)
            parameter.grad = gradient
            self.register_parameter(name, parameter)
        self["rows"].data[3] = 0
        self["rows"].grad[5] = 0

    def __getitem__(self, name):
        return dict(self.named_parameters())[name]


def expected(model, threshold, eps=1e-3):
    """Clipped gradients, share of units clipped and largest ratio, in float64."""
    wanted, clipped, units, top = {}, 0, 0, 0.0
    for name, parameter in model.named_parameters():
        weight, gradient = parameter.detach().double(), parameter.grad.double()
        wanted[name] = gradient
        if name in TENSORS:
            kept = TENSORS[name][1]
            reduced = [d for d in range(weight.ndim) if d not in kept]
            squares = (weight**2, gradient**2)
            sizes = [s.sum(reduced, keepdim=True).sqrt() if reduced else s.sqrt() for s in squares]
            ratio = sizes[1] / sizes[0].clamp(min=eps)
            wanted[name] = gradient * (threshold / ratio).clamp(max=1.0)
            clipped += int((ratio > threshold).sum())
            units += ratio.numel()
            top = max(top, float(ratio.max()))
    return wanted, clipped / units, top


def clipped(model, mode, threshold, **options):
    layout = Layout.of_model(model)
    rule = build(mode, threshold=threshold, **options)
    rule.bind(layout)
    return rule.clip(layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("threshold", [0.02, 0.9, 1.08, 1e3])
def test_units_of_every_size_and_format(dtype, threshold):
    """From thresholds that clip all units, over some units of each tensor, to none."""
    model = Tensors(dtype)
    before = norm_of([p.grad for p in model.parameters()])
    wanted, share, top = expected(model, threshold)
    outcome = clipped(model, "adaptive", threshold, **OPTIONS)
    exact = dtype is not torch.bfloat16
    rel = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), wanted[name], rtol=rel, atol=0)
    assert outcome.fraction == pytest.approx(share, abs=0 if exact else 1e-4)
    assert outcome.max_stat == pytest.approx(top, rel=1e-6)
    assert outcome.norm == pytest.approx(before, rel=3e-7)
    assert outcome.norm_clipped == pytest.approx(norm_of(wanted.values()), rel=3e-7)


@pytest.mark.parametrize("mode", ["adaptive", "value"])
@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1.0, 1e18, 1e25])
def test_sizes_whose_squares_leave_float32(mode, scale):
    """Value clips half of the elements; the weights of adaptive clipping are as small or large."""
    model = Tensors(scale=scale)
    before = [p.grad.double() for p in model.parameters()]
    threshold = 0.7 * scale
    options = OPTIONS | {"eps": 1e-3} if mode == "adaptive" else {}
    if mode == "adaptive":
        wanted = list(expected(model, threshold)[0].values())
    else:
        wanted = [g.clamp(-threshold, threshold) for g in before]
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
