"""Which models ``fully_shard`` cannot shard block by block."""

import pytest
from torch import nn

from runner.parallel.sharding import why_not_shardable


def blocks(*modules):
    net = nn.Module()
    net.blocks = nn.ModuleList(modules)
    net.head = nn.Linear(3, 3)
    return net


def shared_by_two_blocks():
    layer = nn.Linear(3, 3)
    return blocks(nn.Sequential(layer), nn.Sequential(layer))


def shared_with_the_head():
    net = blocks(nn.Linear(3, 3))
    net.head.weight = net.blocks[0].weight
    return net


def one_block_twice():
    block = nn.Linear(3, 3)
    return blocks(block, block)


def blocks_with_two_names():
    net = blocks(nn.Linear(3, 3))
    net.further = nn.Module()
    net.further.blocks = net.blocks
    return net


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (shared_by_two_blocks, ["blocks.0.0.weight", "blocks.1.0.weight"]),
        (shared_with_the_head, ["blocks.0.weight", "head.weight"]),
    ],
)
def test_a_parameter_of_two_groups_is_named(build, names):
    problem = why_not_shardable(build())
    assert problem is not None
    assert problem.startswith(f"{names[0]} and {names[1]} are one parameter, but not in one block")


@pytest.mark.parametrize("build", [one_block_twice, blocks_with_two_names])
def test_a_block_may_be_used_twice(build):
    assert why_not_shardable(build()) is None
