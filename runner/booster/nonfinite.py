"""Steps that are left out: gradients that are not finite, fp16 overflows, and spikes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip import Layout, Number, transfer
from runner.clip.norms import Powers
from runner.clip.shard import is_dtensor
from runner.clip.skip import SkipRule
from runner.config.notation import first_few, ranks_as_text

Nonfinite = Literal["skip", "error", "ignore"]

SMALLEST_SCALE = 2.0**-24
"""Smallest scale of an fp16 loss: the smallest fp16 number. Otherwise a loss that is never finite
would halve the scale down to 0."""


class StepOrderError(RuntimeError):
    """Gradients were clipped, or a step was taken, at a time when the result would be wrong."""


class NonFiniteGradient(FloatingPointError):
    """A gradient is not finite, and ``nonfinite`` is ``error``; or too many were skipped."""

    def __init__(self, finding: str, advice: str = "", norm: float = math.nan) -> None:
        super().__init__(finding, advice, norm)
        self.finding, self.advice, self.norm = finding, advice, norm

    def __str__(self) -> str:
        return f"{self.finding} ({self.advice})" if self.advice else self.finding


def finding(layout: Layout, powers: Powers | None, norm: float) -> str:
    """Name the parameters whose gradient is not finite, and the ranks that hold it.

    One collective of the ranks of the layout, all of which have seen the same norm.
    """
    group, every = layout.group, [[] if powers is None else powers.not_finite()]
    if group is not None:
        here, every = every[0], [[] for _ in range(group.size())]
        dist.all_gather_object(every, here, group=group)
    bad = {name for names in every for name in names}
    text = f"the gradient's norm is {norm}: {first_few([n for n in layout.names if n in bad])}"
    if group is None:
        return text
    ranks = [dist.get_global_rank(group, number) for number, names in enumerate(every) if names]
    return f"{text} on {ranks_as_text(ranks)}"


@dataclass
class LossScale:
    """The dynamic scale of an fp16 loss (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

    Only :meth:`update` changes it, once per optimizer step, after the gradients were unscaled.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000  # consecutive finite steps after which the scale grows
    growth: float = 2.0
    backoff: float = 0.5  # factor after a step that was not finite
    finite_steps: int = 0  # since the scale last changed

    def update(self, finite: bool) -> None:
        if not finite:
            self.scale = max(self.scale * self.backoff, SMALLEST_SCALE)
            self.finite_steps = 0
            return
        self.finite_steps += 1
        if self.finite_steps == self.growth_interval:
            self.scale *= self.growth
            self.finite_steps = 0

    def divide(self, layout: Layout, scaled: bool) -> None:
        """Divide the gradients by the scale; ``scaled``: whether the loss was multiplied by it."""
        shards, gradients = layout.gradients()
        if not gradients:
            return
        if not scaled:
            raise StepOrderError(
                "the loss was not scaled, as fp16 needs it: call booster.backward(loss, optimizer) "
                "instead of loss.backward()"
            )
        for shard, gradient in zip(shards, gradients, strict=True):
            if gradient.dtype == torch.float16:
                raise TypeError(f"{shard.name} is float16: keep parameters in float32")
        torch._foreach_mul_(gradients, 1.0 / self.scale)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.finite_steps = state["scale"], state["finite_steps"]


class Spikes:
    """Applies a skip rule: the loss of the current step, and whether the rule leaves it out."""

    def __init__(
        self, rule: SkipRule | None, start_mean: Callable[[Number], Callable[[], Number]] | None
    ) -> None:
        self.rule, self._start_mean = rule, start_mean
        self._reads = rule is not None and rule.reads_loss
        self.begin_step()

    def begin_step(self) -> None:
        self._found: bool | Tensor = False
        self._loss: Number | None = None

    def add(self, loss: Tensor, weight: float) -> None:
        """Add ``loss * weight`` to the loss of the step on this rank."""
        if not self._reads:
            return
        loss = loss.detach()
        whole = loss.full_tensor() if is_dtensor(loss) else loss
        wide = whole.reshape(()).to(transfer.widest(whole.device))
        added = transfer.read(wide) * weight
        self._loss = added if self._loss is None else self._loss + added

    def start_loss(self) -> Callable[[], Number | None]:
        """Start to exchange the loss of the step, so that it travels while the norm is measured."""
        loss = self._loss
        if not self._reads:
            return lambda: None
        if loss is None:
            raise StepOrderError(
                "the skip rule reads the loss: call booster.backward(loss, optimizer) instead of "
                "loss.backward()"
            )
        return (lambda: loss) if self._start_mean is None else self._start_mean(loss)

    def decide(
        self, norm: Number, loss: Number | None, finite: bool | Tensor, known: bool
    ) -> Number:
        """Decide whether the step is a spike; ``known``: the host waits for the answer."""
        assert self.rule is not None
        spike = self.rule.is_spike(norm, loss, finite)
        self._found = bool(spike) if known else spike
        return spike.to(transfer.widest(spike.device)) if isinstance(spike, Tensor) else spike + 0.0

    def left_out(self, finite: bool | Tensor) -> bool | Tensor:
        """Return whether to take the step: where ``finite`` holds, unless it is a spike."""
        if self._found is False or finite is False:
            return finite
        return ~self._found & finite if isinstance(self._found, Tensor) else False
