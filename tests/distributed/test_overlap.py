"""Gradients that are averaged while the backward pass goes on are those of an average after it."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from runner.booster import Booster
from runner.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin
from runner.parallel import collectives
from tests.distributed.odd_models import Forked
from tests.ranks import run_ranks

STEPS = 5
ANY, LEFT, RIGHT, BY_RANK = 0, 1, -1, 2
"""Which of two branches samples take; by rank, rank 0 takes the right one."""

Backward = Callable[[Tensor], Any]


class Side:
    """A model and how to train it: the plain one and the boosted one take the same calls."""

    def __init__(
        self,
        model: nn.Module,
        run: nn.Module,
        send: Backward,
        no_sync: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.run, self.send, self.no_sync = run, send, no_sync
        self.draw = torch.Generator().manual_seed(dist.get_rank())
        self.named = dict(model.named_parameters())

    def backward(self, share: float = 1.0, branch: int = ANY, send: Backward | None = None) -> None:
        inputs = torch.randn(4, 5, generator=self.draw, dtype=torch.float64)
        if branch == BY_RANK:
            branch = LEFT if dist.get_rank() else RIGHT
        inputs[0, 0] = branch or inputs[0, 0]
        loss = F.cross_entropy(self.run(inputs), torch.tensor([1, 2, 3, 4])) * share
        (send or self.send)(loss)

    def drop(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None


def accumulated(side: Side, step: int) -> None:
    with side.no_sync():
        side.backward(0.25)
    side.backward(0.75)


def replaced(side: Side, step: int) -> None:
    side.backward()
    if step % 2:
        parameter = side.named["enter.weight"]
        parameter.grad = torch.full_like(parameter, float(dist.get_rank()))
        side.named["head.bias"].grad = None


def dropped(side: Side, step: int) -> None:
    if step == 2:
        side.backward(branch=LEFT)
        side.drop()
    side.backward(branch=RIGHT)


def not_finite(side: Side, step: int) -> None:
    side.backward(math.nan if step == 1 and dist.get_rank() else 1.0)


WAYS: dict[str, Callable[[Side, int], None]] = {
    "once": lambda side, step: side.backward(),
    "by branch": lambda side, step: side.backward(branch=BY_RANK),
    "plain": lambda side, step: side.backward(send=Tensor.backward),
    **{way.__name__: way for way in (accumulated, replaced, dropped, not_finite)},
}
PLUGINS = {"data": HybridParallelPlugin, "zero1": partial(LowLevelZeroPlugin, stage=1)}


def off(ours: dict[str, nn.Parameter], local: dict[str, nn.Parameter], size: int) -> Iterator[str]:
    """Compare gradients with the average of the ``local`` ones of each rank, by plain torch."""
    for name, parameter in local.items():
        got, own = ours[name].grad, parameter.grad
        anywhere = torch.tensor(int(own is not None))
        dist.all_reduce(anywhere)
        if not anywhere or not parameter.requires_grad:
            if (got is None) != (own is None):
                yield f"{name} has a gradient that no rank has"
            continue
        summed = torch.zeros_like(parameter) if own is None else own.clone()
        dist.all_reduce(summed)
        if got is None or not torch.allclose(got, summed / size, 1e-12, 1e-15, equal_nan=True):
            yield f"{name} is not the average"


def followed(plugin: str) -> dict[str, tuple[list[str], list[tuple[int, int]]]]:
    """Train in each way; return what is wrong, and how many buckets each step sent early of all."""
    collectives.BUCKET = 300  # bytes: several buckets
    sent, send, found = 0, dist.all_reduce, {}

    def sending(*args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        return send(*args, **options)

    for name, way in WAYS.items():
        torch.manual_seed(1)
        model = Forked().double()
        alone = copy.deepcopy(model)
        booster = Booster(plugin=PLUGINS[plugin](), nonfinite="ignore")
        boosted, wrapped, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        backward = partial(booster.backward, optimizer=wrapped)
        ours = Side(model, boosted, backward, partial(booster.no_sync, boosted, wrapped))
        theirs = Side(alone, alone, Tensor.backward, nullcontext)
        wrong, early = [], []
        for step in range(STEPS):
            dist.all_reduce, sent = sending, 0
            way(ours, step)
            before = sent
            wrapped.unscale()
            early.append((before, sent))
            dist.all_reduce = send
            way(theirs, step)
            lines = off(ours.named, theirs.named, dist.get_world_size())
            wrong += [f"step {step}: {line}" for line in lines]
            ours.drop()
            theirs.drop()
            wrapped.zero_grad()
        found[name] = wrong, early
    return found


@pytest.mark.parametrize(("plugin", "world"), [("data", 2), ("zero1", 3)])
def test_gradients_are_the_average_in_whatever_way_they_came_about(plugin, world):
    for rank in run_ranks(followed, world, plugin):
        assert {name: wrong for name, (wrong, _) in rank.items() if wrong} == {}
        for name in ("once", "accumulated", "plain", "not_finite"):
            assert all(0 < sent < of for sent, of in rank[name][1]), name
