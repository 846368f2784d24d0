"""Modules and weights that many stages use."""

import pytest
import torch
from torch import nn

from runner.booster.plugin import HybridParallelPlugin
from tests.distributed.by_hand import NORM, Loop, unlike
from tests.ranks import run_ranks


def recurrent(tied=True):
    """Layers of which one is there five times, and perhaps its weight once more."""
    torch.manual_seed(0)
    block, again, relu = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.ReLU()
    if tied:
        again.weight = block.weight
    layers = [nn.Linear(5, 6), *[block, relu] * 5, again, nn.Linear(6, 10)]
    return nn.Sequential(*layers).double()


def rows(samples):
    inputs = torch.randn(samples, 5, generator=torch.Generator().manual_seed(2)).double()
    return inputs, torch.arange(samples) % 10


SHARED = [
    ({"pp_size": 4}, True),
    ({"pp_size": 2, "schedule": "interleaved_1f1b"}, True),
    ({"pp_size": 2, "schedule": "zero_bubble", "zero_stage": 1}, True),
    ({"pp_size": 2, "zero_stage": 3}, False),
]


def shared_step(options, tied):
    """A step of :func:`recurrent`: ‖G‖, gradients and weights of the whole."""
    plugin = None if options is None else HybridParallelPlugin(**options)
    loop = Loop(plugin, recurrent(tied))
    loop.backward(*rows(12))
    norm = float(loop.clip(NORM).norm)
    gradients = loop.gradients()
    loop.optimizer.step()
    return norm, gradients, loop.weights()


def shared_steps():
    return [shared_step(*each) for each in SHARED]


def test_a_block_that_many_stages_use_counts_once_and_stays_one():
    ranks = run_ranks(shared_steps, 4, timeout=40)
    for number, (options, tied) in enumerate(SHARED):
        norm, gradients, weights = shared_step(None, tied)
        first = ranks[0][number]
        assert [rank[number][0] for rank in ranks] == pytest.approx([norm] * 4, rel=1e-9), options
        assert unlike(first[1], gradients, 1e-9) == [], options
        assert unlike(first[2], weights, 1e-9) == [], options
