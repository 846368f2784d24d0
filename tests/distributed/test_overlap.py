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
from runner.parallel import buckets
from tests.distributed.odd_models import Forked
from tests.ranks import run_ranks

STEPS = 5
LEFT, RIGHT = 1, -1


class Side:
    """A model and how to train it: the plain one and the boosted one take the same calls."""

    def __init__(
        self,
        model: nn.Module,
        run: nn.Module,
        backward: Callable[[Tensor], Any],
        no_sync: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.model, self.run, self.send, self.no_sync = model, run, backward, no_sync
        self.draw = torch.Generator().manual_seed(dist.get_rank())
        self.named = dict(model.named_parameters())

    def loss(self, share: float = 1.0, branch: int = 0) -> Tensor:
        """Loss of a few samples, by one of two branches, or by any for 0."""
        inputs = torch.randn(4, 5, generator=self.draw, dtype=torch.float64)
        if branch:
            inputs[0, 0] = branch
        outputs: Tensor = self.run(inputs)
        return F.cross_entropy(outputs, torch.tensor([1, 2, 3, 4])) * share

    def backward(self, share: float = 1.0, branch: int = 0) -> None:
        self.send(self.loss(share, branch))

    def drop(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None


def by_rank() -> int:
    return RIGHT if dist.get_rank() == 0 else LEFT


def accumulated(side: Side, step: int) -> None:
    with side.no_sync():
        side.backward(0.5)
    side.backward(0.5)


def unused_in_the_last_microbatch(side: Side, step: int) -> None:
    with side.no_sync():
        side.backward(0.5, LEFT)
    side.backward(0.5, RIGHT)


def twice(side: Side, step: int) -> None:
    side.backward(0.25)
    side.backward(0.75)


def twice_on_other_branches(side: Side, step: int) -> None:
    side.backward(0.5, by_rank())
    side.backward(0.5, RIGHT)


def changed_in_place(side: Side, step: int) -> None:
    side.backward()
    if step == 1 and dist.get_rank() == 1:
        gradient = side.named["head.weight"].grad
        assert gradient is not None
        gradient.mul_(3.0)


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


def frozen(side: Side, step: int) -> None:
    side.named["enter.weight"].requires_grad_(step % 2 == 0)
    side.backward()


def unfrozen_after_gradients_were_dropped(side: Side, step: int) -> None:
    parameter = side.named["enter.weight"]
    if step == 1:
        parameter.requires_grad_(False)
        side.backward()
        side.drop()
        parameter.requires_grad_(True)
    side.backward()


def not_finite(side: Side, step: int) -> None:
    side.backward(math.nan if step == 1 and dist.get_rank() else 1.0)


WAYS: dict[str, Callable[[Side, int], None]] = {
    "once": lambda side, step: side.backward(),
    "one branch on each rank": lambda side, step: side.backward(branch=by_rank()),
    "one branch on all ranks": lambda side, step: side.backward(branch=RIGHT),
    "plain": lambda side, step: side.loss().backward(),
    **{
        way.__name__: way
        for way in (accumulated, unused_in_the_last_microbatch, twice, twice_on_other_branches)
    },
    **{way.__name__: way for way in (changed_in_place, replaced, dropped, frozen, not_finite)},
    "unfrozen": unfrozen_after_gradients_were_dropped,
}
PLUGINS = {"data": HybridParallelPlugin, "zero1": lambda: LowLevelZeroPlugin(stage=1)}


def off(ours: dict[str, nn.Parameter], local: dict[str, nn.Parameter], size: int) -> Iterator[str]:
    """Compare gradients with the average of the ``local`` ones of each rank, by plain torch."""
    for name, parameter in local.items():
        anywhere = torch.tensor(int(parameter.grad is not None))
        dist.all_reduce(anywhere)
        got = ours[name].grad
        if not anywhere or not parameter.requires_grad:
            if (got is None) != (parameter.grad is None):
                yield f"{name} has a gradient that no rank has"
            continue
        own = parameter.grad
        summed = torch.zeros_like(parameter) if own is None else own.clone()
        dist.all_reduce(summed)
        if got is None or not torch.allclose(got, summed / size, 1e-12, 1e-15, equal_nan=True):
            yield f"{name} is not the average"


def followed(plugin: str) -> dict[str, tuple[list[str], list[tuple[int, int]]]]:
    """Train in each way; return what is wrong, and how many buckets each step sent early of all."""
    buckets.BUCKET = 300  # bytes: several buckets
    sent = 0
    send = dist.all_reduce

    def sending(*args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        return send(*args, **options)

    found = {}
    for name, way in WAYS.items():
        torch.manual_seed(1)
        model = Forked().double()
        alone = copy.deepcopy(model)
        booster = Booster(plugin=PLUGINS[plugin](), nonfinite="ignore")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        boosted, wrapped, *_ = booster.boost(model, optimizer)
        ours = Side(
            model,
            boosted,
            partial(booster.backward, optimizer=wrapped),
            partial(booster.no_sync, boosted, wrapped),
        )
        theirs = Side(alone, alone, Tensor.backward, nullcontext)
        wrong: list[str] = []
        early: list[tuple[int, int]] = []
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
        # Each of these steps is averaged twice, so that no later one is sent early.
        assert [sent > 0 for sent, _ in rank["twice"][1]] == [True] * 3 + [False] * 2
