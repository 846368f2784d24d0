"""NaN or inf in one element on one rank, under every plugin: no rank takes the step, and
the message is the same on every rank.

The reference are copies of every weight and every tensor of the optimizer, taken before the step.
"""

import logging
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.booster import NonFiniteGradient
from runner.clip.shard import local
from tests.distributed.cases import MODELS, MODES, PLUGINS, Case, trainer
from tests.distributed.test_matrix import FEWEST
from tests.distributed.training import Rows
from tests.ranks import run_ranks

STEPS, BAD = 4, 2
"""Steps of a training, and the one with the bad element."""

WHEN = ("in a backward pass", "in the final gradient")
MODE_OF = dict(zip(FEWEST, [mode for _ in FEWEST for mode in MODES], strict=False))
"""A clipping mode for each plugin; the slow test has all of them."""


class Planted:
    """Makes one element bad on the last rank that has a gradient of a parameter."""

    def __init__(self, model: nn.Module, when: str, value: float, culprit: int) -> None:
        self.model, self.when, self.value = model, when, value
        self.here = dist.get_rank() == culprit
        self.step = 0
        # Of the last stage, and a replica of tensor ranks.
        self.name = "norm.weight" if hasattr(model, "norm") else "5.bias"
        if when == WHEN[0]:
            model.get_parameter(self.name).register_hook(self.in_backward)

    def in_backward(self, gradient: Tensor) -> Tensor:
        if not self.here or self.step != BAD:
            return gradient
        gradient = gradient.clone()
        local(gradient).view(-1)[0] = self.value
        return gradient

    def in_final(self, made: Any) -> None:
        made.optimizer.unscale()
        if self.here and self.step == BAD and self.when == WHEN[1]:
            _, gradients = made.optimizer.layout.gradients()
            gradients[-1].view(-1)[-1] = self.value


def culprit_of(plugin: str, world: int) -> int:
    """Return a rank of the last stage, the last one where there is a choice."""
    if plugin.startswith("zero_bubble"):  # in its V form the first rank has both ends
        return world // 2 - 1
    return world - 1


def whole_state(made: Any) -> list[Any]:
    """Copies of all that a step changes on this rank."""
    tensors = [shard.weight.clone() for shard in made.optimizer.layout.shards]
    for optimizer in made.optimizer.optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    plain = value.to_local() if isinstance(value, DTensor) else value
                    tensors.append(plain.clone())
    rates = [group["lr"] for group in made.optimizer.param_groups]
    [schedule] = made.state.schedulers
    return [tensors, rates, schedule.last_epoch, dict(made.state.mode.history)]


def planted_steps(
    plugin: str, model: str, mode: str, when: str, value: float, **options: Any
) -> dict[str, Any]:
    """Train with a bad element in one step; return what it changed, and what was logged."""
    torch.manual_seed(0)
    net = MODELS[model]().double()
    plant = Planted(net, when, value, culprit_of(plugin, dist.get_world_size()))
    rows, messages = Rows(), []
    adamw = partial(torch.optim.AdamW, lr=0.01)
    case = Case(model, mode, 2, steps=STEPS)
    made = trainer(case, plugin, model=net, optimizer=adamw, sinks=[rows], **options)
    first = made.optimizer.optimizers[0]
    made.state.schedulers = [torch.optim.lr_scheduler.ExponentialLR(first, 0.7)]
    step, clip = made._step, made.optimizer.clip
    unchanged: list[bool] = []

    def stepped(*args: Any) -> None:
        made.state.step_schedulers()  # for the step before
        plant.step += 1
        before = whole_state(made)
        step(*args)
        made.state.step_schedulers()
        after = whole_state(made)
        same = [len(a) == len(b) for a, b in zip(before[:1], after[:1], strict=True)]
        same += [torch.equal(a, b) for a, b in zip(before[0], after[0], strict=False)]
        unchanged.append(all(same) and before[1:] == after[1:])

    def clipped(rule: Any, **options: bool) -> Any:
        plant.in_final(made)
        return clip(rule, **options)

    made._step, made.optimizer.clip = stepped, clipped  # type: ignore[method-assign]
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("runner.train.bad_gradients").addHandler(handler)
    error = None
    try:
        made.fit()
    except NonFiniteGradient as raised:
        error = str(raised)
    finally:
        logging.getLogger("runner.train.bad_gradients").removeHandler(handler)
    return {
        "unchanged": unchanged,
        "skipped": [row["grad/nonfinite"] for row in rows.rows],
        "said": messages,
        "error": error,
    }


def all_ways(plugin: str, model: str, modes: list[str]) -> list[dict[str, Any]]:
    """Each mode with a bad element in a backward pass and in the final gradient; errors; limits."""
    # Replicas of a final gradient under ddp are the same bits: none of them is bad alone.
    alone = plugin == "ddp"
    return [
        planted_steps(plugin, model, mode, when, value, **options)
        for mode in modes
        for when, value in zip(WHEN, (math.nan, -math.inf), strict=True)
        if not (alone and when == WHEN[1])
        for options in ({}, {"nonfinite": "error"}, {"max_skips": 1})
    ]


def assert_one_rank_stops_all(plugin: str, world: int, model: str, modes: list[str]) -> None:
    ranks = run_ranks(all_ways, world, plugin, model, modes, timeout=400)
    for skipped, failed, ended in zip(*[iter(zip(*ranks, strict=True))] * 3, strict=True):
        for rank in skipped:
            assert rank["unchanged"] == [False, True, False, False], plugin
            assert rank["skipped"] == [0, 1, 1, 1]
            assert rank["error"] is None
        # The first rank speaks for all.
        warnings = [bool(rank["said"]) for rank in skipped]
        assert warnings == [True] + [False] * (world - 1)
        assert f"step {BAD} was skipped: the gradient's norm is" in skipped[0]["said"][0]
        for rank in failed:
            assert rank["error"] == failed[0]["error"]
            assert f"step {BAD}: the gradient's norm is" in rank["error"]
            assert ".weight" in rank["error"] or ".bias" in rank["error"]
            # The step that fails is not in `unchanged`: it did not end.
            assert rank["unchanged"] == [False]
        for rank in ended:
            assert rank["unchanged"] == [False]
            assert rank["error"] == ended[0]["error"]
            assert f"1 steps in a row were skipped, up to step {BAD}" in rank["error"]


@pytest.mark.parametrize("plugin", FEWEST)
@pytest.mark.product(every=10)
def test_one_bad_element_on_one_rank_stops_the_step_of_all(plugin):
    world, model = FEWEST[plugin]
    assert plugin in PLUGINS
    assert_one_rank_stops_all(plugin, world, model, [MODE_OF[plugin]])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plugin", FEWEST)
def test_one_bad_element_under_every_mode(plugin):
    world, model = FEWEST[plugin]
    assert_one_rank_stops_all(plugin, world, model, list(MODES))
