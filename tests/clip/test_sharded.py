"""Clipping by one call where the user sharded the model himself."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from runner import apply_gradient_clipping
from runner.booster import Booster
from runner.booster.plugin import LowLevelZeroPlugin
from tests.ranks import run_ranks

MODES = ("norm", "value", "adaptive")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def clipped(model, mode):
    """The gradients of a model's loss on the same batch, clipped; and what was done."""
    model.zero_grad()
    inputs = torch.arange(20.0, dtype=torch.float64).view(4, 5).sin()
    (100 * model(inputs).square().mean()).backward()
    outcome = apply_gradient_clipping(model, mode, 0.1)
    gradients = [p.grad for p in model.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return tuple(map(float, outcome.metrics)), whole


def both():
    alone = network()
    sharded = copy.deepcopy(alone)
    fully_shard(sharded[0])
    fully_shard(sharded)
    with pytest.raises(TypeError, match=r"parameters\[0\] is sharded over ranks: give the whole"):
        apply_gradient_clipping(sharded.parameters(), "norm", 0.1)
    found = [(clipped(alone, mode), clipped(sharded, mode)) for mode in MODES]
    dist.barrier()
    return found


def evaluated_before_clipping():
    """The norm with a forward pass between backward pass and clipping, and without."""
    norms = []
    for evaluates in (False, True):
        booster, model = Booster(plugin=LowLevelZeroPlugin(stage=2)), network()
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs = torch.arange(20.0, dtype=torch.float64).view(4, 5).sin()
        booster.backward(boosted(inputs).square().mean(), optimizer)
        if evaluates:
            with torch.no_grad():
                boosted(inputs)
        norms.append(float(apply_gradient_clipping(boosted, "norm", 0.01).norm))
    return norms


def test_a_boosted_model_can_be_evaluated_before_it_is_clipped():
    for without, evaluated in run_ranks(evaluated_before_clipping, 2):
        assert evaluated == without > 0.01


def test_a_model_sharded_by_hand_is_clipped_like_a_whole_one():
    for found in run_ranks(both, 2):
        for (outcome, gradients), (sharded, whole) in found:
            assert sharded == pytest.approx(outcome, rel=1e-12)
            assert outcome[0] > 0.1
            for ours, theirs in zip(whole, gradients, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
