"""On several ranks: all skip the same spikes, and weights are those of a run without them."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from runner import Booster, SkipRule, TorchDDPPlugin, TorchFSDPPlugin
from runner.clip import build
from tests.distributed.by_hand import NORM, Loop
from tests.distributed.cases import FAMILIES
from tests.distributed.odd_models import batch_for, make
from tests.ranks import run_ranks

PLUGINS = {"ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}
SPIKES = {6: 900.0, 8: 400.0, 9: 800.0, 10: math.nan, 11: 500.0}
STEPS = range(1, 15)


def plain(tensor):
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def taken_steps(plugin, of, steps, spikes, kind):
    """Steps of two microbatches. The spike is in the loss of the last rank alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    rule = None
    if of is not None:
        rule = SkipRule("sigma", of=of, k=4.0, window=6, min_steps=3, accept_after=None)
    booster = Booster(plugin=PLUGINS[plugin](), skip=rule)
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
    options = {"lr": 0.05} if kind == "adamw" else {"lr": 0.05, "momentum": 0.9}
    made, optimizer, *_ = booster.boost(model, make(model.parameters(), **options))
    mode = build("norm", threshold=0.5)
    mode.bind(optimizer.layout)
    rank, world, taken = dist.get_rank(), dist.get_world_size(), []
    for number in steps:
        factor = spikes.get(number, 1.0) if rank == world - 1 else 1.0
        inputs = torch.arange(12.0).view(3, 4).add(rank).sin() + 0.02 * math.sin(number)
        with booster.no_sync(made, optimizer):
            booster.backward(made(inputs).square().sum() / 20, optimizer)
        booster.backward(made(inputs + 0.1).square().sum() / 20 * factor, optimizer)
        optimizer.clip(mode, fold=True)
        optimizer.step()
        taken.append(optimizer.was_taken())
        optimizer.zero_grad()
    weights = [plain(p) for p in made.unwrap().parameters()]
    state = [
        plain(value)
        for each in optimizer.unwrap().state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    ]
    return taken, weights + state


def both(plugin, of, kind):
    kept = [number for number in STEPS if number not in SPIKES]
    skipping = taken_steps(plugin, of, STEPS, SPIKES, kind)
    return skipping, taken_steps(plugin, None, kept, {}, kind)


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize("of", ["norm", "loss", "either"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_all_ranks_skip_the_spike_of_one(plugin, of, kind):
    for (taken, ours), (_, wanted) in run_ranks(both, 2, plugin, of, kind):
        assert taken == [number not in SPIKES for number in STEPS]
        assert len(ours) == len(wanted)
        for one, other in zip(ours, wanted, strict=True):
            assert torch.equal(one, other)


def state_after(loop):
    """Weights and moments of this rank."""
    kept = [p.detach() for p in loop.raw.parameters()]
    kept += [
        value
        for each in loop.optimizer.unwrap().state.values()
        for value in each.values()
        if isinstance(value, torch.Tensor)
    ]
    return [plain(local(tensor)) for tensor in kept]


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_and_without(plugin, model, of):
    """Steps with spikes and the rule, and those without the spikes and without a rule."""
    taken, states = [], []
    for spikes, numbers in ((SPIKES, STEPS), ({}, [n for n in STEPS if n not in SPIKES])):
        rule = SkipRule("sigma", of=of, k=4.0, window=6, min_steps=3, accept_after=None)
        adamw = partial(torch.optim.AdamW, lr=1e-3)
        torch.manual_seed(0)
        raw = make(model, torch.float64)
        loop = Loop(plugin, raw, None, skip=rule if spikes else None, optimizer=adamw)
        for number in numbers:
            factor = (1.0 + 0.02 * math.sin(number)) * spikes.get(number, 1.0)
            loop.backward(*batch_for(model, torch.float64), factor)
            loop.clip(NORM)
            loop.optimizer.step()
            if spikes:
                taken.append(loop.optimizer.was_taken())
            loop.optimizer.zero_grad()
        states.append(state_after(loop))
    return taken, states


@pytest.mark.parametrize("of", ["norm", "loss"])
@pytest.mark.parametrize(("plugin", "world"), FAMILIES)
@pytest.mark.product(every=4)
def test_every_plugin_takes_the_steps_of_a_run_without_the_spikes(plugin, world, of):
    """Weights and moments are equal bit for bit on every rank."""
    for taken, (ours, wanted) in run_ranks(
        with_and_without, world, plugin, FAMILIES[plugin, world], of
    ):
        assert taken == [number not in SPIKES for number in STEPS]
        assert len(ours) == len(wanted) > 0
        for one, other in zip(ours, wanted, strict=True):
            assert torch.equal(one, other)
