"""The second moments of gradients that optimizers keep, and which rank keeps them.

Adam, AdamW, NAdam and RAdam keep a running mean v of g² of each element, and so does RMSprop. Each
step sets ``v ← β·v + (1 − β)·g²`` with β = ``betas[1]``, or ``alpha``; where ``weight_decay`` is
not decoupled, g is the gradient plus ``weight_decay`` times the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from runner.clip import ClipMode, Layout, Number, ParamShard, transfer
from runner.clip.shard import local

# Name of the second moment in the state of an optimizer. A subclass may change its value.
NAMES = {**dict.fromkeys((Adam, AdamW, NAdam, RAdam), "exp_avg_sq"), RMSprop: "square_avg"}
# Elements for which a CPU computes together, in a cache, and an accelerator, within its memory.
BLOCK, CHUNK = 2**16, 2**26


class OptimizerMisfit(ValueError):
    """An optimizer that a clipping mode is not defined on; the message says what to change."""


class Moment(NamedTuple):
    """The second moment of a shard before a step."""

    value: Tensor | None  # of the shape of the local shard; None before the first step
    beta: float
    steps: Number  # that ``value`` has averaged: a float where the host knows it
    corrected: bool  # whether the optimizer divides v by 1 − β^steps
    decay: float  # factor of the parameter in the gradient that is squared

    def correction(self) -> Number:
        """Return what the next second moment is divided by: 1, or 1 − β^(steps + 1)."""
        steps = self.steps
        if isinstance(steps, Tensor):
            steps = steps.to(transfer.widest(steps.device))  # float32 rounds 1 - β^2 by 1e-5
        return 1.0 - self.beta ** (steps + 1) if self.corrected else 1.0


class Stepped:
    """Which shards of a layout the optimizers of this rank step: with ZeRO 1 not all; a collective.

    ``copies`` is for each parameter the number of ranks that step each element; 0: no optimizer.
    """

    def __init__(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        self.of = (*optimizers, layout)
        # By number: loading a state makes new groups.
        self._places = {
            id(parameter): (optimizer, number)
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        here = [0.0] * len(layout.names)
        for shard in layout.shards:
            if self.steps(shard):
                here[layout.positions[shard.name]] += shard.weight.numel()
        row = transfer.on_device(here, layout.device)
        stepped: list[float] = layout.rows_of_ranks(row).sum(0).tolist()
        pairs = zip(layout.parameters.items(), stepped, strict=True)
        self.copies = {name: n / max(1, math.prod(known.shape)) for (name, known), n in pairs}

    def steps(self, shard: ParamShard) -> bool:
        """Return whether an optimizer of this rank steps the parameter of ``shard``."""
        return id(shard.param) in self._places

    def weight(self, shard: ParamShard) -> float:
        """Return 1 ÷ the ranks that count a shard: those that step it, or all that have it."""
        copies = self.copies[shard.name]
        if not copies:
            return 1.0 / shard.num_replicas
        return 1.0 / copies if self.steps(shard) else 0.0

    def moment(self, shard: ParamShard) -> Moment | None:
        """Return the second moment of a shard, before the step; None where another rank has it."""
        if not self.steps(shard):
            return None
        optimizer, number = self._places[id(shard.param)]
        state, group = optimizer.state.get(shard.param, {}), optimizer.param_groups[number]
        name = next(name for kind, name in NAMES.items() if isinstance(optimizer, kind))
        value, steps, betas = state.get(name), state.get("step", 0.0), group.get("betas")
        coupled = not (isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay"))
        # An optimizer that maximizes squares the negated gradient plus decay.
        sign = -1.0 if group.get("maximize") else 1.0
        return Moment(
            None if value is None else local(value),
            float(group["alpha"] if betas is None else betas[1]),
            transfer.read(steps) if isinstance(steps, Tensor) else steps,
            betas is not None,
            sign * float(group.get("weight_decay") or 0.0) if coupled else 0.0,
        )


@dataclass(eq=False)
class OptimizerMode(ClipMode):
    """A mode that works on the optimizer's step; ``name`` is for messages.

    One that ``predicts`` has to know the second moment after the step.
    """

    name: ClassVar[str]
    predicts: ClassVar[bool] = False
    _stepped: Stepped | None = field(default=None, init=False, repr=False)

    def require_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            exact = type(optimizer) in NAMES
            if not (exact if self.predicts else isinstance(optimizer, tuple(NAMES))):
                raise OptimizerMisfit(
                    f"clip={self.name} needs an optimizer that keeps a second moment of each "
                    f"element as Adam does, and {type(optimizer).__name__} is not known to: choose "
                    "optimizer=adamw (or Adam, NAdam, RAdam, RMSprop), or another mode, as "
                    "clip=norm"
                )

    def bind_optimizers(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        """Find out which optimizer steps which shard, once; a collective of all ranks."""
        self.require_optimizers(optimizers)
        known = () if self._stepped is None else self._stepped.of
        if list(map(id, known)) != list(map(id, (*optimizers, layout))):
            self._stepped = Stepped(optimizers, layout)

    def stepped(self) -> Stepped:
        if self._stepped is None:
            raise OptimizerMisfit(
                f"clip={self.name} works on the optimizer's step, so it needs the optimizer: boost "
                "both (booster.boost(model, optimizer)) or train with runner.Trainer"
            )
        return self._stepped


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of tensors of one shape, block by block along dimension 0."""
    first = tensors[0]
    if first.ndim:
        most = BLOCK if transfer.can_read(first.device) else CHUNK
        size = max(1, len(first) * most // max(first.numel(), 1))
        yield from zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
    else:
        yield tensors
