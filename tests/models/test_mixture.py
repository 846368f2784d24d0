"""A mixture of experts: what each token gets, and that it is the same wherever experts live."""

import copy

import pytest
import torch
import torch.distributed as dist

from runner.models.mixture import Mixture
from tests.ranks import run_ranks

WIDTH = 6
CLOSE = {"rtol": 1e-11, "atol": 1e-13}


def mixture(experts, top_k, crowded):
    """A layer; ``crowded`` sends every token of positive elements to the last two experts."""
    torch.manual_seed(0)
    layer = Mixture(WIDTH, experts, top_k, bias=True).double()
    if crowded:
        preference = torch.linspace(-1, 1, experts, dtype=torch.float64)
        with torch.no_grad():
            layer.router.weight.copy_(preference.unsqueeze(1).expand_as(layer.router.weight))
    return layer


def token_by_token(layer, hidden):
    """The definition, one token at a time."""
    rows = []
    for row in hidden.flatten(0, 1):
        best = (layer.router.weight @ row).softmax(0).topk(layer.top_k)
        weights = best.values / best.values.sum()
        terms = [w * layer.experts[e](row) for w, e in zip(weights, best.indices, strict=True)]
        rows.append(sum(terms))
    return torch.stack(rows).view_as(hidden)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 1), (5, 2), (4, 4)])
@pytest.mark.parametrize("crowded", [False, True])
def test_every_token_gets_the_weighted_sum_of_its_best_experts(experts, top_k, crowded):
    layer = mixture(experts, top_k, crowded=crowded)
    reference = copy.deepcopy(layer)
    hidden = torch.rand(4, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    same = hidden.detach().clone().requires_grad_()
    result = layer(hidden)
    expected = token_by_token(reference, same)
    torch.testing.assert_close(result, expected, **CLOSE)
    result.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(hidden.grad, same.grad, **CLOSE)
    for name, parameter in reference.named_parameters():
        ours = layer.get_parameter(name).grad  # zero, not None, where nobody chose an expert
        theirs = torch.zeros_like(ours) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(ours, theirs, **CLOSE)


# -- over ranks, each of which also computes what one process makes of all tokens


def spread_copy(layer):
    """A copy whose experts are spread over all ranks; the parameters here keep names and values."""
    ours = copy.deepcopy(layer)
    kept = ours.spread(dist.group.WORLD)
    assert list(ours.state_dict()) == ["router.weight", *kept]
    for name, value in ours.named_parameters():
        assert torch.equal(value, layer.get_parameter(name)), name
    return ours


def assert_same(layer, ours, whole, sizes, input_gradient=True):
    """Assert outputs and gradients; those of what is not an expert are summed over ranks."""
    count = sizes[dist.get_rank()]
    first = sum(sizes[: dist.get_rank()])
    share = slice(first, first + count)
    part = whole[share].clone()
    for hidden in (whole, part):
        hidden.requires_grad_(input_gradient)
    expected = layer(whole)
    result = ours(part)
    torch.testing.assert_close(result, expected[share], **CLOSE)
    expected.square().sum().backward()
    result.square().sum().backward()
    if part.requires_grad:
        torch.testing.assert_close(part.grad, whole.grad[share], **CLOSE)
    for name, parameter in ours.named_parameters():
        gradient = parameter.grad
        reference = layer.get_parameter(name).grad
        assert (gradient is None) == (reference is None), name
        if gradient is None:
            continue
        if ".experts." not in f".{name}":
            dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, reference, **CLOSE, msg=name)
    with torch.no_grad():
        assert torch.equal(ours(part), result)


def on_ranks():
    options = [(experts, top_k, False, True) for experts in (8, 5, 3) for top_k in (1, 2)]
    # On 4 ranks some have no expert: nothing of theirs needs a gradient, and still they take part.
    options += [(5, 2, True, True), (3, 2, False, False), (3, 2, True, False)]
    for sizes in ((3, 2, 1, 2), (3, 0, 4, 0)):
        torch.manual_seed(1)
        for experts, top_k, crowded, input_gradient in options:
            layer = mixture(experts, top_k, crowded=crowded)
            whole = torch.rand(sum(sizes), 3, WIDTH, dtype=torch.float64)
            assert_same(layer, spread_copy(layer), whole, sizes, input_gradient)


def test_experts_spread_over_ranks_are_those_of_one_process():
    run_ranks(on_ranks, 4)
