"""Sharded parameters take the step that one process takes, whatever the clipping mode."""

import pytest
import torch

from tests.distributed.test_same_step import assert_binds, assert_same
from tests.distributed.training import train
from tests.ranks import run_ranks


@pytest.mark.parametrize("kind", ["images", "tokens"])
@pytest.mark.parametrize("mode", ["none", "norm", "value", "adaptive"])
@pytest.mark.parametrize(("plugin", "world"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4)])
def test_sharded_ranks_are_one_process(kind, mode, plugin, world):
    torch.set_num_threads(1)
    one = train(kind, mode, 73, batch_size=32, accumulation=1)
    assert_binds(one, mode)
    ranks = run_ranks(train, world, kind, mode, 73, 16 // world, 2, plugin)
    for rank in ranks:
        assert_same(rank, one)
