"""An optimizer that looks beyond single elements is tried before it may step shards."""

import random

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from runner.booster import Booster
from tests.against_torch.plain import PLUGINS, network
from tests.ranks import run_ranks


class NeedsModel(Optimizer):
    """Cannot be built from its options."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(0.01 * p.grad)


class OwnShard(Optimizer):
    """Divides each gradient by the norm of what lies on this rank."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            own = [p, p.grad]
            if isinstance(p, DTensor):
                own = [each.to_local() for each in own]
            own[0].sub_(0.1 * own[1] / (own[1].norm() + 1e-9))


def refused():
    model = network()
    drawn = torch.get_rng_state(), random.getstate()
    with pytest.raises(ValueError, match="OwnShard takes other steps on the parameters"):
        Booster(plugin=PLUGINS["fsdp"]()).boost(model, OwnShard(model.parameters()))
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    # A class that no trial can build is let through.
    other = network()
    Booster(plugin=PLUGINS["fsdp"]()).boost(other, NeedsModel(other))


def test_an_optimizer_that_normalizes_each_shard_is_refused():
    run_ranks(refused, 2)
