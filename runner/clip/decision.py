"""What a clipping mode decides, and the numbers that describe it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from runner.gradients import transfer
from runner.gradients.layout import Layout
from runner.gradients.norms import FALSE, TRUE, powers_of, root

_ONE = torch.ones((), dtype=torch.float64)


@dataclass(slots=True, eq=False)
class Change:
    """What this rank has changed, in a mode that changes elements, units or tensors."""

    changed: Tensor  # parts on this rank that were above λ, each divided by its num_replicas
    total: Tensor  # parts on this rank, each divided by its num_replicas
    max_stat: Tensor  # largest value on this rank that is compared with λ
    power: Tensor | None = None  # share of ‖G‖^p after clipping; None: read the gradients again


@dataclass(slots=True, eq=False)
class Decision:
    """What a mode does to the gradient of one step, and the numbers that describe it.

    All numbers are 0-dimensional tensors on the device of the gradients. A mode that changes
    gradients itself has done so; another one decides on ``factor`` or ``scales``, by which
    gradients are then multiplied. What follows from these is computed when it is read: a step
    itself needs no more.

    Attributes:
        norm: ‖G‖ before clipping.
        threshold: λ in force, NaN where the mode has none.
        factor: what every gradient is multiplied by, which a fused optimizer step may do; None
            where gradients were changed in another way.
        scales: factor of each of ``layout.names``, [parameters], on the device of the layout and
            the same on every rank; None where all have the same one.
        after: ‖G‖ after clipping; None for ``norm`` times ``factor``.
        parts_clipped: share of the elements, or units, that was clipped; None for a mode that
            clips steps. :attr:`fraction` has either.
        largest: largest value that the mode compares with λ: |g| of an element, or
            ‖G_u‖/max(‖W_u‖, ε) of a unit; None for ‖G‖.
        finite: see :class:`Norms`. Where it is False, the step is skipped.
        norm_scaled: norm before clipping of the gradients that are multiplied, which is compared
            with λ, where others are left out; else None.
        inner: decisions of the modes inside of this one, where it has any.
        total: number of elements or units; 1 for a mode that clips steps.
        update: what the mode does to the optimizer's update in :meth:`ClipMode.after_step`, if
            anything.
        spike: 1 if a :class:`SkipRule` skips the step, which clears ``finite`` too, else 0; None
            without such a rule.
    """

    norm: Tensor
    threshold: Tensor
    _: KW_ONLY
    factor: Tensor | None = None
    scales: Tensor | None = None
    after: Tensor | None = None
    parts_clipped: Tensor | None = None
    largest: Tensor | None = None
    finite: Tensor = TRUE
    norm_scaled: Tensor | None = None
    inner: tuple[Inner, ...] = ()
    total: Tensor = _ONE
    update: Any = None
    spike: Tensor | None = None

    @property
    def norm_clipped(self) -> Tensor:
        """‖G‖ after clipping; NaN for a step that is skipped."""
        after = self.after
        if after is None:
            assert self.factor is not None
            after = self.norm * self.factor
        return self._if_finite(after, math.nan)

    @property
    def coef(self) -> Tensor:
        """norm_clipped ÷ norm, 1 where nothing was clipped; NaN for a step that is skipped."""
        if self.factor is not None:
            return self._if_finite(self.factor, math.nan)
        assert self.after is not None
        return self._if_finite(ratio(self.after, self.norm), math.nan)

    @property
    def fraction(self) -> Tensor:
        """Share clipped of what the mode clips: the step, the elements, or the units."""
        fraction = self.parts_clipped
        if fraction is None:
            assert self.factor is not None
            fraction = (self.factor != 1.0).to(self.norm.dtype)
        return self._if_finite(fraction, 0.0)

    @property
    def clipped(self) -> Tensor:
        """1 if anything was changed, else 0."""
        return (self.fraction > 0).to(self.norm.dtype)

    @property
    def max_stat(self) -> Tensor:
        """Largest value that the mode compares with λ; NaN for a step that is skipped.

        A threshold below it would have clipped this step.
        """
        return self._if_finite(self.norm if self.largest is None else self.largest, math.nan)

    @property
    def numbers(self) -> dict[str, Tensor]:
        """The seven numbers of a record, by name."""
        return {
            "norm": self.norm,
            "norm_clipped": self.norm_clipped,
            "coef": self.coef,
            "clipped": self.clipped,
            "fraction": self.fraction,
            "peak": self.max_stat,
            "threshold": self.threshold,
        }

    @property
    def metrics(self) -> tuple[Tensor, ...]:
        """The seven numbers of a record."""
        return tuple(self.numbers.values())

    def _if_finite(self, value: Tensor, if_skipped: float) -> Tensor:
        if self.finite is TRUE:
            return value
        return torch.where(self.finite.to(value.device), value, if_skipped)

    @classmethod
    def stacked(cls, decisions: Sequence[Decision]) -> Decision:
        """Return the decisions of several steps as one, whose numbers are vectors, [steps]."""

        def column(name: str, if_absent: str) -> Tensor | None:
            stored = [getattr(decision, name) for decision in decisions]
            if all(value is None for value in stored):
                return None
            if any(value is None for value in stored):
                stored = [getattr(decision, if_absent) for decision in decisions]
            return torch.stack(stored)

        finite = TRUE
        if any(decision.finite is not TRUE for decision in decisions):
            device = decisions[0].norm.device
            finite = torch.stack([decision.finite.to(device) for decision in decisions])
        return cls(
            norm=torch.stack([decision.norm for decision in decisions]),
            threshold=torch.stack([decision.threshold for decision in decisions]),
            factor=column("factor", "coef"),
            after=column("after", "norm_clipped"),
            parts_clipped=column("parts_clipped", "fraction"),
            largest=column("largest", "max_stat"),
            finite=finite,
        )

    @classmethod
    def untouched(cls, norm: Tensor, threshold: Tensor | float | None) -> Decision:
        """Decide to leave a finite gradient as it is."""
        return cls(norm, limit_in_force(norm, threshold), factor=torch.ones_like(norm))

    @classmethod
    def skipped(cls, norm: Tensor, threshold: float | None) -> Decision:
        """Describe a step that is not taken because its gradient is not finite."""
        missing = torch.full_like(norm, math.nan)
        return cls(norm, limit_in_force(norm, threshold), factor=missing, finite=FALSE)

    @classmethod
    def of_change(
        cls,
        layout: Layout,
        norm: Tensor,
        threshold: Tensor | float | None,
        change: Change,
        norm_type: float,
    ) -> Decision:
        """Describe what all ranks have changed, given the change of this one.

        Counts, maxima and the norm travel in one collective, which runs whatever this rank changed.
        """
        power = change.power
        if power is None:
            power, _ = powers_of(layout, *layout.gradients(), norm_type)
        counts = [change.changed, change.total]
        if math.isinf(norm_type):
            changed, total, after, largest = layout.totals(counts, [power, change.max_stat])
        else:
            changed, total, summed, largest = layout.totals([*counts, power], [change.max_stat])
            after = root(summed, norm_type)
        # The shares of all ranks add up to a whole number, apart from rounding.
        total = total.round()
        return cls.of_parts(
            norm=norm,
            after=after,
            parts_clipped=changed.round() / total.clamp(min=1.0),
            largest=largest,
            limit=threshold,
            total=total,
        )

    @classmethod
    def of_parts(
        cls,
        norm: Tensor,
        after: Tensor,
        parts_clipped: Tensor,
        largest: Tensor,
        limit: Tensor | float | None,
        total: Tensor,
        **more: Any,
    ) -> Decision:
        """Decide to clip a share of ``total`` parts, which every rank knows."""
        return cls(
            norm=norm,
            # The same number twice, not a quotient of two that were rounded differently.
            after=torch.where(parts_clipped > 0, after, norm),
            parts_clipped=parts_clipped,
            largest=largest,
            threshold=limit_in_force(norm, limit),
            total=total,
            **more,
        )

    def if_finite(self, finite: Tensor, threshold_moves: bool = False) -> Decision:
        """Return this decision, or a skipped one if the device finds that it is not ``finite``.

        Where the host knows that, it has not decided on a step to skip. ``threshold_moves``: λ
        changes from step to step, so that a skipped step has no λ.
        """
        if transfer.can_read(finite.device):
            return self
        threshold = self.threshold
        if threshold_moves:
            threshold = torch.where(finite, threshold, math.nan)
        return replace(self, finite=finite, threshold=threshold)


def limit_in_force(norm: Tensor, limit: Tensor | float | None) -> Tensor:
    """Return λ as a number like ``norm``; NaN for none."""
    if isinstance(limit, Tensor):
        return limit
    return torch.full_like(norm, math.nan if limit is None else limit)


def ratio(after: Tensor, before: Tensor) -> Tensor:
    """Return ``after`` ÷ ``before``, and 1 for two zeros."""
    return (after / before).nan_to_num(nan=1.0)


class Inner(NamedTuple):
    """What a mode decided inside of another one: a link of a chain, or the mode of a group."""

    kind: Literal["link", "group"]
    name: str
    decision: Decision
