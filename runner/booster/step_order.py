"""Where an optimizer step stands: which gradients there are, and whether they are final.

A gradient may be clipped only when it is final. :class:`StepOrder` follows the backward passes of a
step and refuses what would give a wrong result: clipping a gradient that still accumulates,
clipping twice, clipping where there is no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from weakref import ReferenceType, ref

from torch import Tensor

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


class StepOrderError(RuntimeError):
    """Gradients were clipped, or a step was taken, at a time when the result would be wrong."""


Written = tuple["ReferenceType[Tensor]", int]
"""A gradient, and how many times it was written to."""


class StepOrder:
    """Follows the backward passes of one optimizer step after another.

    Attributes:
        stage: where the current step stands.
        accumulating: whether backward passes run under ``no_sync`` now.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.stage = StepState.EMPTY
        self.accumulating = False
        self._held = False  # whether a forward pass decided that its gradients are not synchronised
        self._last: Written | None = None  # a gradient that an earlier step has used
        self._shares: bool | None = None  # whether gradients share memory; None while unknown

    def end_backward(self) -> None:
        """Note that a backward pass has run."""
        self._note_backward()

    def _note_backward(self) -> None:
        held = self.accumulating or self._held
        self.stage = StepState.ACCUMULATING if held else StepState.READY
        self._separate()

    def watch(self, output: Tensor, held: bool) -> None:
        """Note the backward pass through an output of the model when it runs.

        This sees a plain ``loss.backward()`` too.
        """
        if output.requires_grad and not output.is_leaf:
            output.register_hook(partial(self._reached, held))  # type: ignore[no-untyped-call]

    def _reached(self, held: bool, gradient: Tensor) -> None:
        if self.stage is not StepState.CLIPPED:
            self._held = held
            self._note_backward()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context of backward passes whose gradients are not final, however they are run."""
        self.accumulating, before = True, _written(self.layout)
        try:
            yield
        finally:
            self.accumulating = False
            if self.stage is StepState.EMPTY and _is_other(_written(self.layout), before):
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
        """Check that a step may be taken."""
        if self.stage is StepState.ACCUMULATING:
            raise StepOrderError(f"cannot step now: {self.stage.value}")
        # The backward pass through an output of a class that pytree does not know is not noted.
        return self.stage is StepState.READY or (
            self.stage is StepState.EMPTY and self._has_gradients()
        )

    def begin_step(self, zeroed: bool) -> None:
        """Begin the next step."""
        self.stage, self._held = StepState.EMPTY, False
        self._last = None if zeroed else _written(self.layout)

    def _separate(self) -> None:
        """Give each gradient its own memory, if the first backward pass made any share it."""
        if self._shares is not False and (self._shares or self._has_gradients()):
            self._shares = self.layout.separate_gradients() or self._shares is True

    def _has_gradients(self) -> bool:
        """Return whether there are gradients other than those of an earlier step."""
        now = _written(self.layout)
        if self._last is None or self.stage is not StepState.EMPTY:
            return now is not None
        return _is_other(now, self._last)


def _written(layout: Layout) -> Written | None:
    """Return the gradient nearest to the loss, which every backward pass adds to or replaces."""
    for shard in reversed(layout.shards):
        gradient = shard.param.grad
        if gradient is not None:
            part = local(gradient)
            return ref(part), part._version
    return None


def _is_other(now: Written | None, before: Written | None) -> bool:
    """Return whether there is a gradient now that is new, or was written to since ``before``."""
    if now is None or before is None:
        return now is not None
    # By identity: references to tensors compare the elements of the tensors.
    return before[0] is not now[0] or before[1] != now[1]
