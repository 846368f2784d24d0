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
from runner.parallel.overlap import Averaging
from tests.distributed.odd_models import Forked
from tests.ranks import run_ranks

STEPS = 5
Backward = Callable[[Tensor], Any]
NoSync = Callable[[], AbstractContextManager[Any]]


class Side:
    """A model and how to train it: the plain one and the boosted one take the same calls."""

    def __init__(
        self, model: nn.Module, run: nn.Module, backward: Backward, no_sync: NoSync
    ) -> None:
        self.model, self.run, self.backward, self.no_sync = model, run, backward, no_sync
        self.draw = torch.Generator().manual_seed(dist.get_rank())

    def loss(self, share: float = 1.0, branch: int = 0) -> Tensor:
        """Loss of a few samples; branch 1 and -1 choose the left and the right one, 0 any."""
        inputs = torch.randn(4, 5, generator=self.draw, dtype=torch.float64)
        if branch:
            inputs[0, 0] = branch
        outputs: Tensor = self.run(inputs)
        return F.cross_entropy(outputs, torch.tensor([1, 2, 3, 4])) * share

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


def once(side: Side, step: int) -> None:
    side.backward(side.loss())


def accumulated(side: Side, step: int) -> None:
    with side.no_sync():
        side.backward(side.loss(0.5))
    side.backward(side.loss(0.5))


def unused_in_the_last_microbatch(side: Side, step: int) -> None:
    with side.no_sync():
        side.backward(side.loss(0.5, branch=1))
    side.backward(side.loss(0.5, branch=-1))


def one_branch_on_each_rank(side: Side, step: int) -> None:
    side.backward(side.loss(branch=1 if dist.get_rank() else -1))


def one_branch_on_all_ranks(side: Side, step: int) -> None:
    side.backward(side.loss(branch=-1))


def twice(side: Side, step: int) -> None:
    side.backward(side.loss(0.25))
    side.backward(side.loss(0.75))


def twice_on_other_branches(side: Side, step: int) -> None:
    side.backward(side.loss(0.5, branch=1 if dist.get_rank() else -1))
    side.backward(side.loss(0.5, branch=-1))


def plain(side: Side, step: int) -> None:
    side.loss().backward()


def changed_in_place(side: Side, step: int) -> None:
    side.backward(side.loss())
    if step == 1 and dist.get_rank() == 1:
        gradient = side.parameters()["head.weight"].grad
        assert gradient is not None
        gradient.mul_(3.0)


def replaced(side: Side, step: int) -> None:
    side.backward(side.loss())
    if step % 2:
        parameter = side.parameters()["enter.weight"]
        parameter.grad = torch.full_like(parameter, float(dist.get_rank()))
        side.parameters()["head.bias"].grad = None


def dropped(side: Side, step: int) -> None:
    if step == 2:
        side.backward(side.loss(branch=1))
        for parameter in side.parameters().values():
            parameter.grad = None
    side.backward(side.loss(branch=-1))


def frozen(side: Side, step: int) -> None:
    side.parameters()["enter.weight"].requires_grad_(step % 2 == 0)
    side.backward(side.loss())


def unfrozen_after_gradients_were_dropped(side: Side, step: int) -> None:
    parameter = side.parameters()["enter.weight"]
    if step == 1:
        parameter.requires_grad_(False)
        side.backward(side.loss())
        for each in side.parameters().values():
            each.grad = None
        parameter.requires_grad_(True)
    side.backward(side.loss())


def not_finite(side: Side, step: int) -> None:
    side.backward(side.loss(math.nan if step == 1 and dist.get_rank() else 1.0))


WAYS = [once, accumulated, unused_in_the_last_microbatch, one_branch_on_each_rank]
WAYS += [one_branch_on_all_ranks, twice, twice_on_other_branches, plain, changed_in_place, replaced]
WAYS += [dropped, frozen, unfrozen_after_gradients_were_dropped, not_finite]
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


def followed(plugin: str, ways: list[Any]) -> dict[str, Any]:
    """Train in each way; return what is wrong, and how many buckets were sent early of how many."""
    buckets.BUCKET = 300  # bytes: several buckets
    found: dict[str, Any] = {}
    finish = Averaging.finish
    early: list[tuple[int, int]] = []

    def finishing(self: Averaging) -> None:
        early.append((len(self._sent), len(self._buckets) if self._trained else 0))
        finish(self)

    Averaging.finish = finishing  # type: ignore[method-assign]
    for way in ways:
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
        early.clear()
        for step in range(STEPS):
            way(ours, step)
            way(theirs, step)
            wrapped.unscale()
            wrong += [
                f"step {step}: {line}"
                for line in off(ours.parameters(), theirs.parameters(), dist.get_world_size())
            ]
            for parameter in (*model.parameters(), *alone.parameters()):
                parameter.grad = None
            wrapped.zero_grad()
        found[way.__name__] = wrong, list(early)
    return found


@pytest.mark.parametrize(("plugin", "world"), [("data", 2), ("zero1", 3)])
def test_gradients_are_the_average_in_whatever_way_they_came_about(plugin, world):
    for rank in run_ranks(followed, world, plugin, WAYS):
        assert {name: wrong for name, (wrong, _) in rank.items() if wrong} == {}
        for name in ("once", "accumulated", "plain", "not_finite"):
            assert all(0 < sent < of for sent, of in rank[name][1]), name
        # Each of these steps is averaged twice, so that no later one is sent early.
        assert [sent > 0 for sent, _ in rank["twice"][1]] == [True] * 3 + [False] * 2
