"""Activation checkpointing: the same gradients to the bit, and less that is kept for them."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from runner.models.gpt import GPT
from runner.parallel.recompute import blocks_of, checkpoint_activations


def small_gpt():
    torch.manual_seed(0)
    sizes = {"vocabulary": 13, "context": 10, "layers": 4, "heads": 2, "width": 8}
    return GPT(**sizes, dropout=0.3, tied=True, bias=True)


def gradients(model):
    """Gradients by name, and the elements that autograd keeps until the backward pass."""
    torch.manual_seed(1)
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    tokens = torch.randint(13, (3, 10))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, sum(kept)


def gradients_of_blocks(every):
    model = small_gpt()
    checkpoint_activations(model, every)
    return gradients(model)


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_are_the_same_to_the_bit(every):
    expected, _ = gradients(small_gpt())
    recomputed, _ = gradients_of_blocks(every)
    assert recomputed.keys() == expected.keys()
    assert all(torch.equal(recomputed[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("every", "share"), [(1, 0.5), (2, 0.75)])
def test_less_is_kept_for_the_backward_pass(every, share):
    _, kept = gradients(small_gpt())
    _, kept_for_blocks = gradients_of_blocks(every)
    assert kept_for_blocks < share * kept


def test_blocks_are_the_innermost_elements_of_lists():
    model = nn.Module()
    inner = [nn.Linear(2, 2), nn.ReLU()]
    stage = nn.Module()
    stage.blocks = nn.ModuleList(inner)
    model.stages = nn.ModuleList([stage, nn.Identity()])
    assert blocks_of(model) == [model.stages[1], *inner]


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="Linear has no blocks: a block is an element of"):
        checkpoint_activations(nn.Linear(2, 2))
