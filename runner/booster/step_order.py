"""Where an optimizer step stands, what is refused in which state, and gradients not finite.

Refused is what would give a wrong result: to clip a gradient that still accumulates, or twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from runner.config.notation import first_few, ranks_as_text
from runner.gradients import Layout, transfer
from runner.gradients.norms import Norms
from runner.parallel.collectives import from_all
from runner.parallel.distribution import ParallelModel

Nonfinite = Literal["skip", "error", "ignore"]

SMALLEST_SCALE = 2.0**-24  # the smallest fp16 number; a loss that is never finite would make it 0


class StepOrderError(RuntimeError):
    """Gradients were clipped, or a step was taken, at a time when the result would be wrong."""


class NonFiniteGradient(FloatingPointError):
    """A gradient is not finite, and ``nonfinite`` is ``error``; or too many were skipped."""

    def __init__(self, finding: str, advice: str = "", norm: float = math.nan) -> None:
        super().__init__(finding, advice, norm)
        self.finding = finding
        self.advice = advice
        self.norm = norm

    def __str__(self) -> str:
        return f"{self.finding} ({self.advice})" if self.advice else self.finding


def finding(layout: Layout, norms: Norms | None, norm: float) -> str:
    """Name the parameters whose gradient is not finite, and their ranks; a collective."""
    group = layout.group
    on_this_rank = [] if norms is None else norms.not_finite()
    on_ranks = [on_this_rank] if group is None else from_all(on_this_rank, group)
    bad = {name for names in on_ranks for name in names}
    if math.isnan(norm) and not bad:
        return "the gradient is finite, and the loss is not"
    text = f"the gradient's norm is {norm}: {first_few([n for n in layout.names if n in bad])}"
    if group is None:
        return text
    ranks = [dist.get_global_rank(group, number) for number, names in enumerate(on_ranks) if names]
    return f"{text} on {ranks_as_text(ranks)}"


@dataclass
class LossScale:
    """The dynamic scale of an fp16 loss (Micikevicius et al. 2018, arXiv 1710.03740, 3.2)."""

    scale: float = 2.0**16
    growth_interval: int = 2000  # consecutive finite steps after which the scale grows
    growth: float = 2.0
    backoff: float = 0.5  # factor after a step that was not finite
    finite_steps: int = 0  # since the scale last changed

    def update(self, finite: bool) -> None:
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale * self.backoff, SMALLEST_SCALE)
        elif self.finite_steps == self.growth_interval:
            self.scale *= self.growth
            self.finite_steps = 0

    def divide(self, layout: Layout, scaled: bool) -> None:
        """Divide the gradients by the scale; ``scaled``: whether the loss was multiplied by it."""
        shards, gradients = layout.gradients()
        if gradients and not scaled:
            raise StepOrderError(
                "the loss was not scaled, as fp16 needs it: call booster.backward(loss, optimizer) "
                "instead of loss.backward()"
            )
        for shard, gradient in zip(shards, gradients, strict=True):
            if gradient.dtype == torch.float16:
                raise TypeError(f"{shard.name} is float16: keep parameters in float32")
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]
        self.finite_steps = state["finite_steps"]


class StepState(Enum):
    """State of an optimizer step, as an error message gives it."""

    EMPTY = "no backward pass has run since the last step"
    ACCUMULATING = (
        "the last backward pass ran under no_sync, so its gradients are not final: run the last "
        "microbatch of a step outside of no_sync, forward and backward pass"
    )
    READY = "gradients are final"
    CLIPPED = "gradients were clipped already in this step"


class StepOrder:
    """Follows the backward passes of one optimizer step after another."""

    def __init__(self, parallel: ParallelModel, loss_scale: LossScale | None = None) -> None:
        self._made = parallel
        self.layout = parallel.layout
        self.loss_scale = loss_scale
        self.accumulating = False  # whether backward passes run under ``no_sync`` now
        self.left = False  # whether gradients of the step before may be left
        self._shares: bool | None = None  # whether gradients share memory; None while unknown
        self._notes_loss = False  # whether to add up the losses of a step
        self.begin_step()

    def begin_step(self) -> None:
        self.stage = StepState.EMPTY
        self._final = False  # whether the gradients are final
        self._scaled = False  # whether the loss was multiplied by the fp16 scale
        self._late = False  # whether a backward pass ran after gradients were final
        self._loss: Tensor | None = None  # of this rank in this step, where it is noted

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Run the backward pass of ``loss * weight``, scaled under fp16."""
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: reduce it to one number")
        start = torch.full_like(loss, self.begin_backward(weight))
        if self._notes_loss:
            self.note_loss(loss, weight)
        # As Tensor.backward, whose checks take a third of a small pass.
        _engine_run_backward((loss,), (start,), False, False, (), True, accumulate_grad=True)
        self.end_backward()

    def begin_backward(self, weight: float = 1.0) -> float:
        """Return the factor of the loss, for callers that run the backward pass themselves."""
        if self._final:
            raise StepOrderError(f"cannot accumulate now: {self.stage.value}")
        self._begin()
        self._scaled = True
        return weight if self.loss_scale is None else weight * self.loss_scale.scale

    def note_loss(self, loss: Tensor, weight: float) -> None:
        """Add the loss of a backward pass to the loss of the step, if a rule compares it."""
        if self._notes_loss:
            device = self.layout.device
            part = loss.detach().reshape(()).to(device, transfer.widest(device)) * weight
            self._loss = part if self._loss is None else self._loss + part

    def end_backward(self) -> None:
        self.stage = StepState.ACCUMULATING if self.accumulating else StepState.READY
        self._separate()

    def watch(self, output: Tensor) -> None:
        """Note the backward pass through an output of the model, also a plain one."""
        if output.requires_grad and not output.is_leaf:
            output.register_hook(self._reached)  # type: ignore[no-untyped-call]

    def _reached(self, gradient: Tensor) -> None:
        if self._final:
            self._late = True
        else:
            self._begin()
            self.end_backward()

    def _begin(self) -> None:
        """Note, before the first backward pass of a step, that its gradients begin anew."""
        self.left = self.left and (self.stage is not StepState.EMPTY or self._has_gradients())

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context of backward passes whose gradients are not final, however they are run."""
        nested = self.accumulating
        self.accumulating = True
        self._made.hold(True)
        try:
            yield
        finally:
            self.accumulating = nested
            self._made.hold(nested)

    def begin_clip(self) -> None:
        """Check that gradients may be clipped now; make them final and unscale them."""
        if not self.require_step("clip"):
            raise StepOrderError(f"cannot clip now: {self.stage.value}")
        self.unscale()

    def require_step(self, what: str = "step") -> bool:
        """Check that gradients are final; return whether there are any to clip."""
        if self.stage is StepState.ACCUMULATING:
            raise StepOrderError(f"cannot {what} now: {self.stage.value}")
        if self._late:
            raise StepOrderError(
                "a backward pass ran after the gradients were final: run all of them before "
                "optimizer.unscale() and before clipping"
            )
        # After a backward pass a rank of a split model may have no gradient; the others wait for
        # it in the collectives. A backward pass of the user's own model is not noted.
        unnoted = self.stage is StepState.EMPTY and self._has_gradients()
        return unnoted or self.stage is StepState.READY

    def unscale(self) -> None:
        """Synchronise the gradients and divide them by the fp16 scale, once a step, in place."""
        if self._final:
            return
        self._make_final()
        if self.loss_scale is not None:
            self.loss_scale.divide(self.layout, self._scaled)
        self._final = True

    def _make_final(self) -> None:
        self._begin()
        if self.left and self._made.once:
            raise StepOrderError(
                "gradients of the step before are left, and this plugin cannot make them final "
                "again: call optimizer.zero_grad() after each step"
            )
        self._separate()
        self._made.sync_grads()

    def _separate(self) -> None:
        """Give each gradient its own memory, if the first backward pass made any share it."""
        if self._shares is not False and (self._shares or self._has_gradients()):
            self._shares = self.layout.separate_gradients() or self._shares is True

    def _has_gradients(self) -> bool:
        return any(shard.param.grad is not None for shard in self.layout.shards)
