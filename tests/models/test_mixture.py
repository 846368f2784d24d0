"""A mixture of experts: what each token gets, and that it is the same wherever experts live."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runner.models.mixture import Mixture, MixtureGPT, partitioned
from tests.ranks import run_ranks

WIDTH = 6
CLOSE = {"rtol": 1e-12, "atol": 1e-14}


def mixture(experts=5, top_k=2, width=WIDTH, bias=True):
    torch.manual_seed(0)
    return Mixture(width, experts, top_k, bias).double()


def all_to_two(layer):
    """Sends every token of positive elements to the last two experts, the last of them first."""
    preference = torch.linspace(-1, 1, len(layer.experts), dtype=torch.float64)
    with torch.no_grad():
        layer.router.weight.copy_(preference.unsqueeze(1).expand_as(layer.router.weight))


def token_by_token(layer, hidden):
    """The definition, one token at a time."""
    rows = []
    for row in hidden.flatten(0, 1):
        chances = (layer.router.weight @ row).softmax(0)
        best = chances.topk(layer.top_k)
        weights = best.values / best.values.sum()
        terms = [w * layer.experts[e](row) for w, e in zip(weights, best.indices, strict=True)]
        rows.append(sum(terms))
    return torch.stack(rows).view_as(hidden)


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 1), (5, 2), (4, 4)])
@pytest.mark.parametrize("crowded", [False, True])
def test_every_token_gets_the_weighted_sum_of_its_best_experts(experts, top_k, crowded):
    layer = mixture(experts, top_k)
    if crowded:
        all_to_two(layer)
    reference = copy.deepcopy(layer)
    hidden = torch.rand(4, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    same = hidden.detach().clone().requires_grad_()
    probe = torch.randn_like(hidden)
    result, expected = layer(hidden), token_by_token(reference, same)
    torch.testing.assert_close(result, expected, **CLOSE)
    (result * probe).sum().backward()
    (expected * probe).sum().backward()
    torch.testing.assert_close(hidden.grad, same.grad, **CLOSE)
    for name, gradient in gradients(reference).items():
        ours = layer.get_parameter(name).grad
        wanted = torch.zeros_like(ours) if gradient is None else gradient
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-13)


def test_an_expert_that_nobody_chose_has_a_gradient_of_zero():
    layer = mixture()
    all_to_two(layer)
    layer(torch.rand(2, 3, WIDTH, dtype=torch.float64)).sum().backward()
    for name, gradient in gradients(layer).items():
        chosen = name.startswith(("router", "experts.3", "experts.4"))
        assert gradient is not None, name
        assert (gradient.abs().sum() > 0) == chosen, name


def test_an_empty_batch_passes_forward_and_backward():
    layer = mixture()
    hidden = torch.zeros(0, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    result = layer(hidden)
    assert result.shape == hidden.shape
    result.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert all(gradient.abs().sum() == 0 for gradient in gradients(layer).values())


def test_a_gradient_of_the_gradient():
    layer = mixture(experts=3, width=2)
    hidden = torch.randn(1, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (hidden,))
    assert torch.autograd.gradgradcheck(layer, (hidden,))


def test_the_weights_of_half_precision_logits_are_not_rounded_to_it():
    layer = mixture(experts=2).bfloat16()
    for expert, answer in zip(layer.experts, (1.0, -1.0), strict=True):
        nn.init.zeros_(expert.down.weight)
        nn.init.constant_(expert.down.bias, answer)
    hidden = 0.1 * torch.randn(2, 50, WIDTH, dtype=torch.bfloat16)
    first, second = layer.router(hidden).double().unbind(-1)
    # What the two weights differ by, which is small: rounded weights miss it by far.
    expected = ((first - second) / 2).tanh().unsqueeze(-1).expand_as(hidden)
    result = layer(hidden)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("top_k", [-1, 0, 6])
def test_a_choice_of_no_expert_or_too_many_is_refused(top_k):
    with pytest.raises(ValueError, match=f"top_k {top_k} is not between 1 and the 5 experts"):
        mixture(top_k=top_k)


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (8, 4), (5, 2), (5, 4), (3, 4), (1, 3)])
def test_experts_are_dealt_in_runs_as_even_as_can_be(experts, ranks):
    runs = partitioned(experts, ranks)
    assert len(runs) == ranks
    assert [number for run in runs for number in run] == list(range(experts))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


# What follows starts ranks. Each of them also computes what one process makes of all tokens.


def share(sizes):
    """The part of a batch that is this rank's, when they have ``sizes`` samples each."""
    first = sum(sizes[: dist.get_rank()])
    return slice(first, first + sizes[dist.get_rank()])


def spread_copy(layer):
    """A copy whose experts are spread over all ranks, with the names that stay."""
    ours = copy.deepcopy(layer)
    return ours, ours.spread(dist.group.WORLD)


def assert_names_stay(layer, ours, kept):
    here = {name: value for name, value in ours.named_parameters() if name.startswith("experts.")}
    assert list(here) == kept
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, kept)
    whole = [name for name, _ in layer.named_parameters() if name.startswith("experts.")]
    assert [name for names in everyone for name in names] == whole
    for name, value in here.items():
        assert torch.equal(value, layer.get_parameter(name))
    assert list(ours.state_dict()) == ["router.weight", *kept]


def assert_same_gradients(layer, ours):
    """Of the experts here, and of the rest summed over the ranks."""
    for name, parameter in ours.named_parameters():
        gradient = parameter.grad.clone()
        if ".experts." not in f".{name}":
            dist.all_reduce(gradient)
        wanted = layer.get_parameter(name).grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-13, msg=name)


def check_layer(experts, top_k, sizes, crowded, input_gradient):
    layer = mixture(experts, top_k)
    if crowded:
        all_to_two(layer)
    ours, kept = spread_copy(layer)
    assert_names_stay(layer, ours, kept)
    whole = torch.rand(sum(sizes), 3, WIDTH, dtype=torch.float64)
    probe = torch.randn_like(whole)
    part = whole[share(sizes)].clone()
    for hidden in (whole, part):
        hidden.requires_grad_(input_gradient)
    expected, result = layer(whole), ours(part)
    torch.testing.assert_close(result, expected[share(sizes)], **CLOSE)
    (expected * probe).sum().backward()
    (result * probe[share(sizes)]).sum().backward()
    if input_gradient:
        torch.testing.assert_close(part.grad, whole.grad[share(sizes)], **CLOSE)
    assert_same_gradients(layer, ours)
    with torch.no_grad():
        quiet = ours(part)
    assert not quiet.requires_grad
    assert torch.equal(quiet, result)


def check_layers(sizes):
    torch.manual_seed(1)
    for experts in (8, 5, 3):
        for top_k in (1, 2):
            check_layer(experts, top_k, sizes, crowded=False, input_gradient=True)
    check_layer(5, 2, sizes, crowded=True, input_gradient=True)
    # On 4 ranks some have no expert: nothing of theirs needs a gradient, and still they take part.
    check_layer(3, 2, sizes, crowded=False, input_gradient=False)
    check_layer(3, 2, sizes, crowded=True, input_gradient=False)


@pytest.mark.parametrize("sizes", [(4, 3), (0, 7), (3, 2, 1, 2), (3, 0, 4, 0)])
def test_experts_spread_over_ranks_are_those_of_one_process(sizes):
    run_ranks(check_layers, len(sizes), sizes)


def check_frozen(sizes):
    """Only experts of the first rank learn."""
    layer = mixture(4)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith("experts.0"))
    ours, _ = spread_copy(layer)
    whole = torch.rand(sum(sizes), 3, WIDTH, dtype=torch.float64)
    layer(whole).square().sum().backward()
    ours(whole[share(sizes)]).square().sum().backward()
    for name, gradient in gradients(ours).items():
        wanted = layer.get_parameter(name).grad
        assert (gradient is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(gradient, wanted, **CLOSE)


def check_half_precision(sizes):
    """Under autocast experts answer in bfloat16; a rank without experts has none to tell it."""
    layer = mixture(3).float()
    ours, _ = spread_copy(layer)
    whole = torch.rand(sum(sizes), 3, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected, result = layer(whole), ours(whole[share(sizes)])
    assert result.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(result, expected[share(sizes)], rtol=1e-2, atol=1e-3)
    expected.sum().backward()
    result.sum().backward()
    for name, gradient in gradients(ours).items():
        if name.startswith("experts."):
            wanted = layer.get_parameter(name).grad
            torch.testing.assert_close(gradient, wanted, rtol=2e-2, atol=2e-2)


def check_model(sizes):
    torch.manual_seed(0)
    shape = {"vocabulary": 13, "context": 5, "layers": 3, "heads": 2, "width": 8}
    model = MixtureGPT(**shape, experts=5, top_k=2, tied=True, bias=True, dropout=0.0).double()
    ours = copy.deepcopy(model)
    for block in ours.blocks:
        block.mlp.spread(dist.group.WORLD)
    tokens = torch.randint(13, (sum(sizes), 5))
    probe = torch.randn(sum(sizes), 5, 13, dtype=torch.float64)
    expected, result = model(tokens), ours(tokens[share(sizes)])
    torch.testing.assert_close(result, expected[share(sizes)], **CLOSE)
    (expected * probe).sum().backward()
    (result * probe[share(sizes)]).sum().backward()
    assert_same_gradients(model, ours)


def check_rest():
    sizes = (2, 0, 3, 1)
    torch.manual_seed(1)
    check_frozen(sizes)
    check_half_precision(sizes)
    check_model(sizes)
    layer = mixture()
    layer.spread(dist.group.WORLD)
    with pytest.raises(RuntimeError, match="spread over a group already"):
        layer.spread(dist.group.WORLD)


def test_frozen_parts_half_precision_and_a_whole_model_on_four_ranks():
    run_ranks(check_rest, 4)


def check_alone(device, backend):
    group = dist.new_group(backend=backend)
    layer = mixture().to(device)
    ours = copy.deepcopy(layer)
    ours.spread(group)
    hidden = torch.rand(2, 3, WIDTH, dtype=torch.float64, device=device)
    for one in (layer, ours):
        one(hidden).square().sum().backward()
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, layer.get_parameter(name).grad, **CLOSE)


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "gloo"),
        pytest.param(
            "cuda",
            "nccl",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
            ],
        ),
    ],
)
def test_a_group_of_one_rank_keeps_every_expert(device, backend):
    run_ranks(check_alone, 1, device, backend)
