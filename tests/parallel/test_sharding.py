"""What is done to parameters before they are sharded."""

import logging

import torch
from torch import nn

from runner.parallel.sharding import Sharding, shard_model
from runner.parallel.usage import Usage
from tests.ranks import run_ranks


def shard_channels_last() -> tuple[list[str], bool]:
    """What is logged of a model with two channels-last weights, and whether the values are kept."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 3))
    model = model.to(memory_format=torch.channels_last)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("runner.parallel.sharding").addHandler(handler)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    shard_model(model, mesh, Sharding(), Usage())
    after = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    return said, all(torch.equal(after[name], before[name]) for name in before)


def test_channels_last_weights_are_made_contiguous():
    [(said, kept)] = run_ranks(shard_channels_last, 1)
    assert kept
    assert said == [
        "made contiguous, because fully_shard keeps no other memory format (channels_last): "
        "0.weight, 1.weight"
    ]
