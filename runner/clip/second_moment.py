"""The second moments of gradients that optimizers keep, and which rank keeps them.

Adam, AdamW, NAdam and RAdam keep a running mean v of g² of each element under the name
``exp_avg_sq``, RMSprop under ``square_avg``; optimizers of other libraries use the same names.
Each step sets ``v ← β·v + (1 − β)·g²`` with β = ``betas[1]``, or ``alpha``; where ``weight_decay``
is not decoupled, g is the gradient plus ``weight_decay`` times the parameter. Whether an optimizer
does this is tried on small tensors, so no list of names is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.clip import transfer
from runner.clip.layout import Layout
from runner.clip.like import optimizer_like, step_with
from runner.clip.shard import ParamShard, local
from runner.clip.transfer import Number

NAMES = ("exp_avg_sq", "square_avg")
"""Names of second moments in the state of an optimizer."""

TOLERANCE = 1e-9
"""Largest relative error of a second moment in a trial, which is computed in float64."""

INSTEAD = "choose optimizer=adamw (or Adam, NAdam, RAdam, RMSprop), or another mode, as clip=norm"

WITHOUT_OPTIMIZER = (
    "clip={0} works on the optimizer's step, so it needs the optimizer: boost both "
    "(booster.boost(model, optimizer)) or train with runner.Trainer"
)


class OptimizerMisfit(ValueError):
    """An optimizer that a clipping mode is not defined on; the message says what to change."""


@dataclass(frozen=True)
class Kept:
    """How an optimizer keeps second moments.

    Attributes:
        name: their name in its state.
        follows: whether they follow the rule at the top of this module.
        coupled: whether weight decay is part of the gradient that is squared.
    """

    name: str
    follows: bool
    coupled: bool


class Moment(NamedTuple):
    """The second moment of a shard before a step.

    Attributes:
        value: v of each element, of the shape of the local shard; None before the first step.
        beta: weight of ``value`` in the next second moment; NaN if it is unknown.
        steps: number of steps that ``value`` has averaged: a float where the host knows it.
        corrected: whether the optimizer divides v by ``1 − β^steps``.
        decay: factor of the parameter in the gradient that is squared.
        sign: -1 where the optimizer maximizes, so that it squares the negated gradient plus decay.
    """

    value: Tensor | None
    beta: float
    steps: Number
    corrected: bool
    decay: float
    sign: float

    def squared(self, shard: ParamShard, gradient: Tensor) -> Tensor:
        """Return the gradient whose square enters the second moment."""
        if not self.decay:
            return gradient
        return torch.add(gradient, shard.weight, alpha=self.sign * self.decay)

    def correction(self) -> Number:
        """Return what the next second moment is divided by: 1, or 1 − β^(steps + 1)."""
        if not self.corrected:
            return 1.0
        steps = self.steps
        if isinstance(steps, Tensor):
            steps = steps.to(transfer.widest(steps.device))  # float32 rounds 1 - β^2 by 1e-5
        correction: Number = 1.0 - self.beta ** (steps + 1)
        return correction


class Stepped:
    """Which shards of a layout the optimizers of this rank step.

    With ZeRO stage 1 another rank may step the shard of a parameter. One collective where a layout
    spans ranks, so every rank has to make it.

    Attributes:
        copies: for each parameter of the layout the number of ranks that step each of its elements;
            0 where no optimizer holds it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        self._of = (*optimizers, layout)
        # By number: loading a state makes new groups.
        self._places = {
            id(parameter): (optimizer, number)
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self.index = {name: i for i, name in enumerate(layout.names)}
        here = [0.0] * len(self.index)
        for shard in layout.shards:
            if id(shard.param) in self._places:
                here[self.index[shard.name]] += shard.weight.numel()
        row = transfer.on_device(here, layout.device)
        stepped: list[float] = layout.rows_of_ranks(row).sum(0).tolist()
        whole = [math.prod(known.shape) for known in layout.parameters.values()]
        pairs = zip(layout.names, stepped, whole, strict=True)
        self.copies = {name: count / max(elements, 1) for name, count, elements in pairs}

    def are_of(self, optimizers: Sequence[Optimizer], layout: Layout) -> bool:
        """Return whether this was made of the same optimizers and layout."""
        given = (*optimizers, layout)
        return len(given) == len(self._of) and all(map(is_, given, self._of))

    def steps(self, shard: ParamShard) -> bool:
        """Return whether an optimizer of this rank steps the parameter of ``shard``."""
        return id(shard.param) in self._places

    def group(self, shard: ParamShard) -> dict[str, Any]:
        """Return the parameter group of a shard that this rank steps."""
        optimizer, number = self._places[id(shard.param)]
        group: dict[str, Any] = optimizer.param_groups[number]
        return group


class SecondMoments(Stepped):
    """The second moments of the shards that the optimizers of this rank step."""

    def __init__(
        self, optimizers: Sequence[Optimizer], layout: Layout, mode: str, *, predicts: bool
    ) -> None:
        found = require_second_moments(optimizers, mode, predicts=predicts)
        self._kept = dict(zip(map(id, optimizers), found, strict=True))
        super().__init__(optimizers, layout)

    def of(self, shard: ParamShard) -> Moment:
        """Return the second moment of a shard that this rank steps, before the step."""
        optimizer, number = self._places[id(shard.param)]
        kept, group = self._kept[id(optimizer)], optimizer.param_groups[number]
        return _moment(optimizer.state.get(shard.param, {}), group, kept)


def require_second_moments(
    optimizers: Sequence[Optimizer], mode: str, *, predicts: bool
) -> list[Kept]:
    """Check that every optimizer keeps a second moment of each element."""
    return [_require(optimizer, mode, predicts) for optimizer in optimizers]


def _require(optimizer: Optimizer, mode: str, predicts: bool) -> Kept:
    name = type(optimizer).__name__
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            kept = _tried(optimizer)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OptimizerMisfit(
            f"clip={mode} needs the second moments of {name}, which cannot be tried ({first}): "
            f"{INSTEAD}"
        ) from error
    if kept is None:
        raise OptimizerMisfit(
            f"clip={mode} needs an optimizer that keeps a second moment of each element, and "
            f"{name} keeps none: {INSTEAD}"
        )
    if predicts and not kept.follows:
        raise OptimizerMisfit(
            f"clip={mode} needs to know the second moments after a step, and {name} computes them "
            f"in another way than Adam: {INSTEAD}"
        )
    return kept


def _tried(optimizer: Optimizer) -> Kept | None:
    """Return how an optimizer keeps second moments, by steps of another one of its kind."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    device = held[0].device if held else torch.device("cpu")
    starts = [
        [_wave((4, 3, *[2] * dim)[:dim], 0, device) for dim in _dims(group["params"])]
        for group in optimizer.param_groups
    ]
    made = optimizer_like(optimizer, starts)
    for step in (1, 2):
        step_with(made, [[_wave(t.shape, step, device) for t in group] for group in starts])
    name = next((n for n in NAMES if all(n in made.state[p] for p in _all(made))), None)
    if name is None or any(made.state[p][name].shape != p.shape for p in _all(made)):
        return None
    last = [[_wave(t.shape, 3, device) for t in group] for group in starts]
    predicted = {coupled: _predicted(made, name, last, coupled) for coupled in (False, True)}
    step_with(made, last)
    values = [made.state[p][name] for p in _all(made)]
    for coupled, wanted in predicted.items():
        if _counts(made, Kept(name, True, coupled), 3) and all(map(_near, values, wanted)):
            return Kept(name, True, coupled)
    return Kept(name, False, False)


def _counts(made: Optimizer, kept: Kept, steps: int) -> bool:
    """Return whether an optimizer has counted its steps for each parameter."""
    return all(
        float(_moment(made.state[parameter], group, kept).steps) == steps
        for group in made.param_groups
        for parameter in group["params"]
    )


def _predicted(
    made: Optimizer, name: str, gradients: Sequence[Sequence[Tensor]], coupled: bool
) -> list[Tensor]:
    """Return the second moments after the next step, by the rule at the top of this module."""
    found = []
    for group, own in zip(made.param_groups, gradients, strict=True):
        for parameter, gradient in zip(group["params"], own, strict=True):
            moment = _moment(made.state[parameter], group, Kept(name, True, coupled))
            assert moment.value is not None
            shard = ParamShard("", parameter, units=None)  # type: ignore[arg-type]
            squares = moment.squared(shard, gradient).square()
            found.append(moment.beta * moment.value + (1 - moment.beta) * squares)
    return found


def _moment(state: dict[str, Any], group: dict[str, Any], kept: Kept) -> Moment:
    value = state.get(kept.name)
    betas = group.get("betas")
    beta = group.get("alpha", math.nan) if betas is None else betas[1]
    steps = state.get("step", group.get("step", 0.0))
    if isinstance(steps, Tensor) and transfer.can_read(steps.device):
        steps = float(steps)
    decay = float(group.get("weight_decay") or 0.0) if kept.coupled else 0.0
    return Moment(
        None if value is None else local(value),
        float(beta),
        steps,
        betas is not None,
        decay,
        -1.0 if group.get("maximize") else 1.0,
    )


def _dims(parameters: Sequence[Tensor]) -> list[int]:
    # An optimizer may keep other things of matrices than of vectors.
    return sorted({parameter.ndim for parameter in parameters} | {2})


def _wave(shape: Sequence[int], step: int, device: torch.device) -> Tensor:
    """Return values that are neither zero nor alike, without drawing random numbers."""
    count = math.prod(shape)
    angles = torch.arange(1, count + 1, dtype=torch.float64, device=device) * (1.0 + step)
    return (angles.sin() + 2.0).mul_(step + 0.5).view(tuple(shape))


def _all(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _near(value: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(value.double(), wanted, rtol=TOLERANCE, atol=0.0)
