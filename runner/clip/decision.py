"""What is measured before a clipping mode decides, and what it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.layout import Layout
from runner.clip.norms import Powers, combine, local_power, measure
from runner.clip.transfer import Number


@dataclass(frozen=True, slots=True)
class GradStats:
    """Measurements of a final gradient, the same on every rank.

    Attributes:
        norm: ‖G‖ of the synchronised, unscaled, normalised gradient.
        finite: whether ``norm`` is finite. A bool where the host knows it; a 0-dimensional boolean
            tensor where only the accelerator does.
        powers: see :class:`runner.clip.norms.Measured`.
        work: what a mode measured besides, in the same read, see :meth:`ClipMode.measure`.
    """

    norm: Number
    finite: bool | Tensor
    powers: Powers | None = None
    work: Any = None

    @classmethod
    def of(cls, layout: Layout, norm_type: float = 2.0, each: bool = False) -> GradStats:
        """Measure the gradients of ``layout``, see :func:`runner.clip.norms.measure`."""
        norm, powers = measure(layout, norm_type, each)
        finite = torch.isfinite(norm) if isinstance(norm, Tensor) else math.isfinite(norm)
        return cls(norm, finite, powers)


@dataclass(frozen=True, slots=True)
class Parts:
    """What this rank changes, in a mode that clips parts: elements, units or tensors.

    Attributes:
        changed: number of parts on this rank that are above λ, each divided by its num_replicas.
        total: number of parts on this rank, each divided by its num_replicas.
        work: what the mode needs to change them.
        power: this rank's share of ‖G‖^p after clipping, as :func:`runner.clip.norms.local_power`
            returns it; None where the gradients have to be read again for it.
    """

    changed: Number
    total: Number
    work: Sequence[Any]
    power: Number | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What a mode does to the gradient of one step, and what it measured to decide that.

    All numbers are floats on a CPU and 0-dimensional tensors on an accelerator (a λ that does not
    change is a float there too).

    A decision without ``parts`` is complete: applying it multiplies every gradient by ``coef``,
    which a fused optimizer step may do instead. One with ``parts`` is completed by
    :meth:`runner.clip.mode.ClipMode.apply`: the norm after clipping needs a pass over the changed
    gradients, and the counts of other ranks travel in the same collective. Until then
    ``max_stat`` is that of this rank, and the four attributes before it are NaN.

    Attributes:
        norm: ‖G‖ before clipping.
        norm_clipped: ‖G‖ after clipping.
        coef: norm_clipped ÷ norm, 1 where nothing was clipped.
        clipped: 1 if the step changed anything, else 0.
        fraction: share clipped of what the mode clips: the step, the elements, or the units.
        max_stat: largest value that the mode compares with λ: ‖G‖, |g| of an element, or
            ‖G_u‖/max(‖W_u‖, ε) of a unit. A threshold below it would have clipped this step.
        threshold: λ in force, NaN where the mode has none.
        finite: whether the gradient is finite, see :class:`GradStats`. Where it is not, the step is
            skipped: the gradient is left as it is on a CPU, and is not used on an accelerator.
        parts: what this rank has to change; None where ``coef`` says all.
    """

    norm: Number
    norm_clipped: Number
    coef: Number
    clipped: Number
    fraction: Number
    max_stat: Number
    threshold: Number
    _: KW_ONLY
    finite: bool | Tensor = True
    parts: Parts | None = None

    @property
    def metrics(self) -> tuple[Number, ...]:
        """The seven numbers, in the order of the attributes."""
        return (
            self.norm,
            self.norm_clipped,
            self.coef,
            self.clipped,
            self.fraction,
            self.max_stat,
            self.threshold,
        )

    @classmethod
    def untouched(cls, norm: Number, threshold: Number | None, max_stat: Number) -> Decision:
        """Decide to leave a finite gradient as it is."""
        return cls(
            norm, norm, 1.0, 0.0, 0.0, max_stat, math.nan if threshold is None else threshold
        )

    @classmethod
    def skipped(cls, norm: Number, threshold: Number | None) -> Decision:
        """Describe a step that is not taken because its gradient is not finite."""
        nan = math.nan
        return cls(
            norm, nan, nan, 0.0, 0.0, nan, nan if threshold is None else threshold, finite=False
        )

    @classmethod
    def change_parts(
        cls, norm: Number, threshold: Number, max_stat: Number, parts: Parts
    ) -> Decision:
        """Decide to change ``parts``.

        Args:
            norm: ‖G‖.
            threshold: λ in force.
            max_stat: largest value on this rank that the mode compares with λ.
            parts: what this rank has to change.
        """
        nan = math.nan
        return cls(norm, nan, nan, nan, nan, max_stat, threshold, parts=parts)

    def where(self, finite: Tensor) -> Decision:
        """Return this decision where ``finite`` holds, else a skipped one, chosen on the device.

        Args:
            finite: 0-dimensional boolean, whether the gradient is finite.
        """
        if self.parts is not None:
            return replace(self, finite=finite)
        nan = math.nan
        return replace(
            self,
            norm_clipped=torch.where(finite, self.norm_clipped, nan),
            coef=torch.where(finite, self.coef, nan),
            clipped=torch.where(finite, self.clipped, 0.0),
            fraction=torch.where(finite, self.fraction, 0.0),
            max_stat=torch.where(finite, self.max_stat, nan),
            finite=finite,
        )

    def complete(self, layout: Layout, norm_type: float) -> Decision:
        """Fill in the numbers of all ranks once the parts were changed.

        Counts, maxima and the norm travel in one collective, which runs whatever this rank changed.

        Args:
            layout: layout whose gradients were changed.
            norm_type: p of the total norm.
        """
        assert self.parts is not None
        changed, total = self.parts.changed, self.parts.total
        if layout.group is None and not isinstance(changed, Tensor) and changed == 0:
            return Decision.untouched(self.norm, self.threshold, self.max_stat)
        power = self.parts.power
        if power is None:
            power = local_power(layout, norm_type)
        powers, changes, totals, maxima = layout.gather([power, changed, total, self.max_stat])
        norm, max_stat = self.norm, combine(maxima, math.inf)
        after = combine(powers, norm_type)
        if isinstance(norm, Tensor):
            # The shares of all ranks add up to the count, apart from rounding.
            counts = transfer.on_device([sum(changes), sum(totals)], norm.device).round()
            fraction = counts[0] / counts[1].clamp(min=1.0)
            coef = (after / norm).nan_to_num(nan=1.0)
            done = Decision(norm, after, coef, fraction.sign(), fraction, max_stat, self.threshold)
            return done.where(self.finite) if isinstance(self.finite, Tensor) else done
        count, everything = round(float(sum(changes))), round(float(sum(totals)))
        if count == 0:
            # The same number twice, not a quotient of two that were rounded differently.
            return Decision.untouched(norm, self.threshold, max_stat)
        share = count / everything
        return Decision(norm, after, after / norm, 1.0, share, max_stat, self.threshold)
