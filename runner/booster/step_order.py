"""Where an optimizer step stands: which gradients there are, and whether they are final.

:class:`StepOrder` follows the backward passes of a step and refuses what would give a wrong result:
clipping a gradient that still accumulates, clipping twice, clipping where there is no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from runner.booster.nonfinite import LossScale, Spikes
from runner.booster.nonfinite import StepOrderError as StepOrderError
from runner.clip import Layout
from runner.clip.shard import local


class StepState(Enum):
    """State of an optimizer step, with the reason that an error message gives."""

    EMPTY = "no backward pass has run since the last step"
    ACCUMULATING = (
        "the last backward pass ran under no_sync, so its gradients are not final: run the last "
        "microbatch of a step outside of no_sync, forward and backward pass"
    )
    READY = "gradients are final"
    CLIPPED = "gradients were clipped already in this step"


class StepOrder:
    """Follows the backward passes of one optimizer step after another.

    Attributes:
        stage: where the current step stands.
        accumulating: whether backward passes run under ``no_sync`` now.
    """

    def __init__(self, layout: Layout, loss_scale: LossScale | None, spikes: Spikes) -> None:
        self.layout, self.loss_scale, self._spikes = layout, loss_scale, spikes
        self.stage = StepState.EMPTY
        self.accumulating = False
        self._held = False  # whether a forward pass decided that its gradients are not synchronised
        # A gradient that an earlier step has used, and how many times it was written to.
        self._last: tuple[ReferenceType[Tensor], int] | None = None
        self._shares: bool | None = None  # whether gradients share memory; None while unknown
        self._final = self._unscaled = self._scaled = False
        self._start: tuple[Any, Tensor] | None = None  # gradient that the backward pass starts from

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Run the backward pass of ``loss * weight``, scaled under fp16."""
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: reduce it to one number")
        key = (self.begin_backward(weight), loss.dtype, loss.shape)
        self.add_loss(loss, weight)
        if self._start is None or self._start[0] != key:
            self._start = (key, loss.new_full(loss.shape, key[0]))
        loss.backward(self._start[1])  # type: ignore[no-untyped-call]
        self.end_backward()

    def begin_backward(self, weight: float = 1.0) -> float:
        """Return the factor of the loss, for callers that run the backward pass themselves."""
        if self._final:
            raise StepOrderError(f"cannot accumulate now: {self.stage.value}")
        self._scaled, self._held = True, False
        return weight if self.loss_scale is None else weight * self.loss_scale.scale

    def add_loss(self, loss: Tensor, weight: float = 1.0) -> None:
        """Add to the loss that a skip rule reads, for callers that run the backward pass.

        The mean over data-parallel ranks of what a step adds up is the loss of its gradient.
        """
        self._spikes.add(loss, weight)

    def end_backward(self) -> None:
        held = self.accumulating or self._held
        self.stage = StepState.ACCUMULATING if held else StepState.READY
        self._separate()

    def watch(self, output: Tensor, held: bool) -> None:
        """Note the backward pass through an output of the model, a plain ``loss.backward()`` too.

        ``held``: the forward pass decided that its gradients are not synchronised.
        """
        if output.requires_grad and not output.is_leaf:
            output.register_hook(partial(self._reached, held))  # type: ignore[no-untyped-call]

    def _reached(self, held: bool, gradient: Tensor) -> None:
        if self.stage is not StepState.CLIPPED:
            self._held = held
            self.end_backward()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context of backward passes whose gradients are not final, however they are run."""
        self.accumulating, before = True, self._written()
        try:
            yield
        finally:
            self.accumulating = False
            if self.stage is StepState.EMPTY and self._is_new(before):
                self.stage = StepState.ACCUMULATING

    def require_clippable(self) -> None:
        """Check that there are gradients, that they are final, and that they were not clipped."""
        if self.stage is StepState.CLIPPED or self.stage is StepState.ACCUMULATING:
            raise StepOrderError(f"cannot clip now: {self.stage.value}")
        # After a backward pass a rank of a split model may have no gradient. The other ranks wait
        # for it in the collectives.
        waited_for = self.stage is StepState.READY and self.layout.group is not None
        if not waited_for and not self._has_gradients():
            raise StepOrderError(f"cannot clip now: {StepState.EMPTY.value}")

    def require_step(self) -> bool:
        """Check that a step may be taken; return whether there are gradients to clip."""
        if self.stage is StepState.ACCUMULATING:
            raise StepOrderError(f"cannot step now: {self.stage.value}")
        # The backward pass through an output of a class that pytree does not know is not noted.
        return self.stage is StepState.READY or (
            self.stage is StepState.EMPTY and self._has_gradients()
        )

    def begin_step(self, zeroed: bool) -> None:
        self.stage, self._held = StepState.EMPTY, False
        self._last = None if zeroed else self._written()
        self._final = self._unscaled = self._scaled = False
        self._spikes.begin_step()

    def unscale(self) -> None:
        """Synchronise the gradients and divide them by the fp16 scale, once a step, in place."""
        if not self._final:
            self._make_final()
            self._final = True
        if self.loss_scale is not None and not self._unscaled:
            self.loss_scale.divide(self.layout, self._scaled)
            self._unscaled = True

    def _make_final(self) -> None: ...

    def _separate(self) -> None:
        """Give each gradient its own memory, if the first backward pass made any share it."""
        if self._shares is not False and (self._shares or self._has_gradients()):
            self._shares = self.layout.separate_gradients() or self._shares is True

    def _has_gradients(self) -> bool:
        """Return whether there are gradients other than those of an earlier step."""
        return self._is_new(self._last if self.stage is StepState.EMPTY else None)

    def _written(self) -> tuple[ReferenceType[Tensor], int] | None:
        """Return the gradient nearest to the loss, which every backward pass writes to."""
        for shard in reversed(self.layout.shards):
            if (gradient := shard.param.grad) is not None:
                part = local(gradient)
                return ref(part), part._version
        return None

    def _is_new(self, before: tuple[ReferenceType[Tensor], int] | None) -> bool:
        """Return whether there is a gradient that is new, or was written to since ``before``."""
        now = self._written()
        if now is None or before is None:
            return now is not None
        # By identity: references to tensors compare the elements of the tensors.
        return before[0] is not now[0] or before[1] != now[1]
