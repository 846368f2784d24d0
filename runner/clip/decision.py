"""What is measured before a clipping mode decides, and what it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.layout import Layout
from runner.clip.norms import Powers, combine, local_power, measure
from runner.clip.split import Split, measure_split
from runner.clip.transfer import Number


@dataclass(frozen=True, slots=True)
class GradStats:
    """Measurements of a final gradient, the same on every rank.

    Attributes:
        norm: ‖G‖ of the synchronised, unscaled, normalised gradient.
        finite: whether ``norm`` is finite. A bool where the host knows it; a 0-dimensional boolean
            tensor where only the accelerator does. The boosted optimizer clears it for a step that
            its skip rule leaves out, so that no mode takes account of such a step.
        powers: see :class:`runner.clip.norms.Measured`.
        work: what a mode measured besides, in the same read, see :meth:`ClipMode.measure`.
        split: norms of the gradients that a coefficient multiplies, and of those that it leaves
            out; None where it multiplies all of them.
        part: whether ``norm`` is that of the gradients that a coefficient multiplies, see
            :meth:`ClipMode.decide`.
    """

    norm: Number
    finite: bool | Tensor
    powers: Powers | None = None
    work: Any = None
    split: Split | None = None
    part: bool = False

    @classmethod
    def of(
        cls, layout: Layout, norm_type: float = 2.0, each: bool = False, split: bool = False
    ) -> GradStats:
        """Measure the gradients of ``layout``, see :func:`runner.clip.norms.measure`.

        Args:
            layout: where the gradients live.
            norm_type: p of the norm.
            each: whether the share of each gradient is wanted too.
            split: whether the norms of the two parts of ``split`` are wanted too.
        """
        if split:
            (norm, powers), parts = measure_split(layout, norm_type, each)
        else:
            (norm, powers), parts = measure(layout, norm_type, each), None
        finite = torch.isfinite(norm) if isinstance(norm, Tensor) else math.isfinite(norm)
        return cls(norm, finite, powers, split=parts)


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

    A decision without ``parts`` is complete: applying it multiplies every gradient by ``coef``, or
    some of them by ``factor``, which a fused optimizer step may do instead; or the gradient of each
    parameter by its own of ``scales``. One with ``parts`` is completed by
    :meth:`runner.clip.mode.ClipMode.apply`: the norm after clipping needs a pass over the changed
    gradients, and the counts of other ranks travel in the same collective. Until then ``max_stat``
    is that of this rank, and the four attributes before it are NaN.

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
        parts: what this rank has to change; None where ``coef``, ``factor`` or ``scales`` says all.
        factor: what the gradients that are multiplied are multiplied by, where others are left as
            they are (:meth:`Layout.leave_unscaled`); None where all are multiplied by ``coef``.
        norm_scaled: norm of the gradients that ``factor`` multiplies, before clipping: the norm
            that the mode compares with λ. None where it is ``norm``.
        scales: factor of each parameter of ``layout.names``, [parameters], on the device of the
            layout and the same on every rank; None where all parameters have the same one.
        inner: decisions of the modes inside of this one, where it has any.
        total: number of parts (elements, units or tensors) that ``fraction`` is a share of; 1 for
            a mode that clips steps.
        update: what the mode does to the optimizer's update in :meth:`ClipMode.after_step`; None
            where it leaves the update as it is.
        spike: 1 if the step is skipped by a rule on spikes, see
            :class:`runner.clip.skip.SkipRule`, else 0. ``finite`` is cleared too, though the
            gradient is finite.
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
    factor: Number | None = None
    norm_scaled: Number | None = None
    scales: Tensor | None = None
    inner: tuple[Inner, ...] = ()
    total: Number = 1.0
    update: Any = None
    spike: Number = 0.0

    def as_inner(self, kind: Literal["link", "group"], name: object) -> Inner:
        """Return the numbers of this decision, as those of a mode inside of another one."""
        return Inner(kind, str(name), replace(self, parts=None, scales=None))

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

    def of_whole(self, norm: Number, split: Split, norm_type: float) -> Decision:
        """Return a decision on some gradients as one on the whole gradient.

        Args:
            norm: ‖G‖ of the whole gradient.
            split: norms of the gradients that this decision is on, and of all others.
            norm_type: p of the norms.
        """
        if self.parts is not None:
            return replace(self, norm=norm)
        factor, parts = self.coef, [self.coef * split.scaled, split.rest]
        powers = parts if math.isinf(norm_type) else [part**norm_type for part in parts]
        after = combine(powers, norm_type)
        if isinstance(factor, Tensor):
            after = torch.where(factor == 1.0, norm, after)
        elif factor == 1.0:
            after = norm
        if isinstance(norm, Tensor):
            coef: Number = (after / norm).nan_to_num(nan=1.0)
        else:
            coef = after / norm if norm else 1.0
        return replace(
            self,
            norm=norm,
            norm_clipped=after,
            coef=coef,
            factor=factor,
            norm_scaled=split.scaled,
        )

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
            # A λ that moves is on the device too; it is that of this step.
            threshold=torch.where(finite, self.threshold, nan)
            if isinstance(self.threshold, Tensor)
            else self.threshold,
            finite=finite,
            factor=None if self.factor is None else torch.where(finite, self.factor, nan),
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
            kept = Decision.untouched(self.norm, self.threshold, self.max_stat)
            return replace(kept, total=total)
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
            done = Decision(
                norm,
                after,
                coef,
                fraction.sign(),
                fraction,
                max_stat,
                self.threshold,
                total=counts[1],
            )
            return done.where(self.finite) if isinstance(self.finite, Tensor) else done
        count, everything = round(float(sum(changes))), round(float(sum(totals)))
        if count == 0:
            # The same number twice, not a quotient of two that were rounded differently.
            kept = Decision.untouched(norm, self.threshold, max_stat)
            return replace(kept, total=everything)
        metrics = (norm, after, after / norm, 1.0, count / everything, max_stat, self.threshold)
        return Decision(*metrics, total=everything)


class Inner(NamedTuple):
    """What a mode decided inside of another one.

    Attributes:
        kind: whether it is a link of a chain, or clips a group of parameters.
        name: number of the link, from 0, or pattern of the group.
        decision: its numbers.
    """

    kind: Literal["link", "group"]
    name: str
    decision: Decision
