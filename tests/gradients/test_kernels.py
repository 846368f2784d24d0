"""Each kernel of a CPU against its plain twin, which an accelerator uses."""

import math

import pytest
import torch
from torch import nn

from runner.gradients import Layout, host, plain

SIZES = [(3,), (40, 50), (7, 4, 3, 3), (70_000,), (300, 500)]


def layout_of(dtype=torch.float32):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return Layout.of_parameters(parameters)


def gradients_of(layout):
    return [shard.param.grad.clone() for shard in layout.shards]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_powers_are_those_of_the_twin(norm_type):
    layout = layout_of()
    expected, each = plain.powers(layout, *layout.gradients(), norm_type, each=True)
    whole, shares = host.powers(layout, *layout.gradients(), norm_type, each=True)
    alone, _ = host.powers(layout, *layout.gradients(), norm_type, each=False)
    torch.testing.assert_close(whole, expected, rtol=1e-6, atol=0)
    assert torch.equal(alone, whole)
    torch.testing.assert_close(shares, each, rtol=1e-6, atol=0)


def test_the_power_is_the_same_to_the_bit_with_the_shares_of_small_gradients():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (7, 300, 4_000)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    layout = Layout.of_parameters(parameters)
    whole, shares = host.powers(layout, *layout.gradients(), 2.0, each=True)
    alone, _ = host.powers(layout, *layout.gradients(), 2.0, each=False)
    assert torch.equal(alone, whole)
    squares = [parameter.grad.double().square().sum() for parameter in parameters]
    torch.testing.assert_close(shares, torch.stack(squares), rtol=1e-12, atol=0)


@pytest.mark.parametrize("limit", [0.5, 1.5, 100.0])
def test_elements_are_compared_as_by_the_twin(limit):
    layout = layout_of()
    expected = plain.compare_elements(layout, limit)
    elements = host.compare_elements(layout, limit)
    torch.testing.assert_close(elements.power, expected.power, rtol=1e-6, atol=0)
    assert (elements.above, elements.largest) == (expected.above, expected.largest)
    clamped = [gradient.clamp(-limit, limit).double() for gradient in gradients_of(layout)]
    power = sum(float(gradient.square().sum()) for gradient in clamped)
    assert float(elements.clamped) == pytest.approx(power, rel=1e-6)


def test_a_gradient_is_clamped_as_by_the_twin():
    layout = layout_of()
    ours, theirs = gradients_of(layout), gradients_of(layout)
    host.clamp(ours, 0.7)
    plain.clamp(theirs, 0.7)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("coef", [0.3, 1.0, 1e-32])
def test_gradients_are_multiplied_as_by_the_twin(coef):
    layout = layout_of()
    ours, theirs = gradients_of(layout), gradients_of(layout)
    factor = layout.number(coef)
    host.multiply(ours, factor)
    plain.multiply(theirs, factor)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_each_gradient_is_multiplied_as_by_the_twin():
    layout = layout_of()
    ours, theirs = gradients_of(layout), gradients_of(layout)
    factors = torch.tensor([1.0, 0.5, 0.1, 1.0, 1e-3], dtype=torch.float64)
    host.multiply_each(ours, factors)
    plain.multiply_each(theirs, factors)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_units_are_scaled_as_by_the_twin(share):
    gradient = gradients_of(layout_of())[1]
    norms = host.unit_norms(gradient, 1, torch.float64)
    torch.testing.assert_close(norms, plain.unit_norms(gradient, 1, torch.float64))
    factors = torch.where(torch.arange(len(norms)) < share * len(norms), 0.5, 1.0)
    ours, theirs = gradient.clone(), gradient.clone()
    host.scale_units(ours, 1, factors)
    plain.scale_units(theirs, 1, factors)
    assert torch.equal(ours, theirs)


@pytest.fixture
def many():
    """Tensors with units: small ones of one unit length, a large one, and one that is not there."""
    shapes = [(1, 5), (4, 5), (6, 5), (3, 5), (8, 600), (7, 1), (1, 7)]
    units = [
        plain.TensorUnits(kept=1, units=units, length=length, dtype=torch.float32, packs=True)
        for units, length in shapes
    ]
    units[3] = units[3]._replace(packs=False)
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in shapes]
    tensors[3] = None
    return tensors, [kernels.UnitKernel(units, torch.device("cpu")) for kernels in (host, plain)]


def test_units_of_many_tensors_are_measured_as_by_the_twin(many):
    tensors, kernels = many
    ours, theirs = (kernel.norms(tensors, torch.float64) for kernel in kernels)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


def test_units_of_many_tensors_are_scaled_as_by_the_twin(many):
    tensors, kernels = many
    coefs = torch.linspace(0.1, 1.0, 30, dtype=torch.float64)
    scaled = []
    for kernel in kernels:
        copies = [None if tensor is None else tensor.clone() for tensor in tensors]
        kernel.scale(copies, coefs, torch.float64)
        scaled.append([copy for copy in copies if copy is not None])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*scaled, strict=True))
