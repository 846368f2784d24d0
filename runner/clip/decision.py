"""What is measured before a clipping mode decides, and what it decides."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from runner.gradients import transfer
from runner.gradients.layout import Layout
from runner.gradients.norms import Powers, combine_norms, norm_of_ranks, powers_of, root

_IF_SKIPPED: dict[str, float] = {
    "norm_clipped": math.nan,
    "coef": math.nan,
    "max_stat": math.nan,
    "clipped": 0.0,
    "fraction": 0.0,
}
_TRUE = torch.tensor(True)
_ONE = torch.ones((), dtype=torch.float64)


class Split(NamedTuple):
    """Norms of what a coefficient multiplies and leaves out, see :meth:`Layout.leave_unscaled`."""

    scaled: Tensor
    unscaled: Tensor


@dataclass(frozen=True, slots=True)
class GradStats:
    """Measurements of a final gradient, the same on every rank.

    Attributes:
        norm: ‖G‖ of the gradient.
        finite: whether ``norm`` is finite, a 0-dimensional boolean tensor. It is on the host where
            the host has read it. Cleared for a step that a skip rule leaves out.
        powers: share of each gradient of this rank; None where it was not measured.
        work: what a mode measured besides, in the same read, see :meth:`ClipMode.measure`.
        split: norms of what a coefficient multiplies and of what it leaves out, where it does.
        part: True if ``norm`` counts only the gradients that a coefficient multiplies.
    """

    norm: Tensor
    finite: Tensor
    powers: Powers | None = None
    work: Any = None
    split: Split | None = None
    part: bool = False

    @classmethod
    def of(
        cls, layout: Layout, norm_type: float = 2.0, each: bool = False, split: bool = False
    ) -> GradStats:
        """Measure the gradients of ``layout``: one small collective if it spans ranks.

        With ``each`` there are ``powers``; as on an accelerator, and where ‖G‖ is not finite.
        """
        power, powers = powers_of(layout, *layout.gradients(), norm_type, each or split)
        if not split:
            return cls.measured(norm_of_ranks(layout, power, norm_type), powers)
        assert powers is not None
        nothing = layout.number(0.0).view(1)  # where there is no gradient
        shares = torch.cat([powers.each.to(nothing), nothing])
        scales = layout.constant("scaled", powers.shards, lambda shard: shard.scaled)
        scaled = torch.cat([scales, nothing]) > 0
        parts = torch.stack([shares.where(scaled, 0.0), shares.where(~scaled, 0.0)])
        if math.isinf(norm_type):
            norms = layout.totals(maxima=parts.amax(1).unbind())
        else:
            norms = [root(power, norm_type) for power in layout.totals(parts.sum(1).unbind())]
        norm_scaled, norm_unscaled = norms
        norm = combine_norms(norms, norm_type)
        split_norms = Split(scaled=norm_scaled, unscaled=norm_unscaled)
        return replace(cls.measured(norm, powers), split=split_norms)

    @classmethod
    def measured(cls, norm: Tensor, powers: Powers | None, work: Any = None) -> GradStats:
        """Return the measurements that a mode has made itself."""
        return cls(norm, is_finite(norm), powers, work)


@dataclass(frozen=True, slots=True)
class Change:
    """What this rank has changed, in a mode that changes elements, units or tensors."""

    changed: Tensor  # parts on this rank that were above λ, each divided by its num_replicas
    total: Tensor  # parts on this rank, each divided by its num_replicas
    max_stat: Tensor  # largest value on this rank that is compared with λ
    power: Tensor | None = None  # share of ‖G‖^p after clipping; None: read the gradients again


@dataclass(frozen=True, slots=True)
class Decision:
    """What a mode does to the gradient of one step, and what it measured to decide that.

    All numbers are 0-dimensional tensors on the device of the gradients. Applying it multiplies
    every gradient by ``coef``, or each gradient by its own factor of ``scales``; a fused optimizer
    step may multiply by ``coef`` instead. A mode that changes gradients itself has done so.

    Attributes:
        norm: ‖G‖ before clipping.
        norm_clipped: ‖G‖ after clipping.
        coef: norm_clipped ÷ norm, 1 where nothing was clipped.
        clipped: 1 if anything was changed, else 0.
        fraction: share clipped of what the mode clips: the step, the elements, or the units.
        max_stat: largest value that the mode compares with λ: ‖G‖, |g| of an element, or
            ‖G_u‖/max(‖W_u‖, ε) of a unit. A threshold below it would have clipped this step.
        threshold: λ in force, NaN where the mode has none.
        finite: see :class:`GradStats`. Where it is False, the step is skipped.
        norm_scaled: norm before clipping of the gradients that are multiplied, where
            :meth:`Layout.leave_unscaled` names others, which is compared with λ; else None.
        scales: factor of each of ``layout.names``, [parameters], on the device of the layout and
            the same on every rank; None where all have the same one.
        inner: decisions of the modes inside of this one, where it has any.
        total: number of parts that ``fraction`` is a share of; 1 for a mode that clips steps.
        update: what the mode does to the optimizer's update in :meth:`ClipMode.after_step`, if
            anything.
        spike: 1 if a :class:`SkipRule` skips the step, which clears ``finite`` too, else 0; None
            without such a rule.
    """

    norm: Tensor
    norm_clipped: Tensor
    coef: Tensor
    clipped: Tensor
    fraction: Tensor
    max_stat: Tensor
    threshold: Tensor
    _: KW_ONLY
    finite: Tensor = _TRUE
    norm_scaled: Tensor | None = None
    scales: Tensor | None = None
    inner: tuple[Inner, ...] = ()
    total: Tensor = _ONE
    update: Any = None
    spike: Tensor | None = None

    @property
    def metrics(self) -> tuple[Tensor, ...]:
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
    def untouched(
        cls,
        norm: Tensor,
        threshold: Tensor | float | None,
        max_stat: Tensor,
        total: Tensor = _ONE,
    ) -> Decision:
        """Decide to leave a finite gradient as it is."""
        zero = torch.zeros_like(norm)
        return cls(
            norm=norm,
            norm_clipped=norm,
            coef=torch.ones_like(norm),
            clipped=zero,
            fraction=zero,
            max_stat=max_stat,
            threshold=limit_in_force(norm, threshold),
            total=total,
        )

    @classmethod
    def skipped(cls, norm: Tensor, threshold: float | None) -> Decision:
        """Describe a step that is not taken because its gradient is not finite."""
        numbers: dict[str, Any] = {}
        for name, value in _IF_SKIPPED.items():
            numbers[name] = torch.full_like(norm, value)
        in_force = limit_in_force(norm, threshold)
        return cls(norm, **numbers, threshold=in_force, finite=torch.tensor(False))

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
            changed, total, after, max_stat = layout.totals(counts, [power, change.max_stat])
        else:
            changed, total, summed, max_stat = layout.totals([*counts, power], [change.max_stat])
            after = root(summed, norm_type)
        # The shares of all ranks add up to a whole number, apart from rounding.
        total = total.round()
        return cls.of_share(
            norm=norm,
            after=after,
            share=changed.round() / total.clamp(min=1.0),
            max_stat=max_stat,
            limit=threshold,
            total=total,
        )

    @classmethod
    def of_share(
        cls,
        norm: Tensor,
        after: Tensor,
        share: Tensor,
        max_stat: Tensor,
        limit: Tensor | float | None,
        total: Tensor,
        **more: Any,
    ) -> Decision:
        """Decide to clip a ``share`` of ``total`` parts, which every rank knows."""
        clipped = share > 0
        # The same number twice, not a quotient of two that were rounded differently.
        after = torch.where(clipped, after, norm)
        coef = more.pop("coef") if "coef" in more else ratio(after, norm)
        return cls(
            norm=norm,
            norm_clipped=after,
            coef=coef,
            clipped=clipped.to(norm.dtype),
            fraction=share,
            max_stat=max_stat,
            threshold=limit_in_force(norm, limit),
            total=total,
            **more,
        )

    def of_whole(self, layout: Layout, norm: Tensor, split: Split, norm_type: float) -> Decision:
        """Return a decision on the gradients of ``split.scaled`` as one on the whole gradient."""
        after = combine_norms([self.coef * split.scaled, split.unscaled], norm_type)
        after = torch.where(self.coef != 1.0, after, norm)
        return replace(
            self,
            norm=norm,
            norm_clipped=after,
            norm_scaled=split.scaled,
            coef=ratio(after, norm),
            scales=torch.where(layout.scaled, self.coef, 1.0),
        )

    def if_finite(self, finite: Tensor, threshold_moves: bool = False) -> Decision:
        """Return this decision, or a skipped one if the device finds that it is not ``finite``.

        Where the host knows that, it has not decided on a step to skip. ``threshold_moves``: λ is
        that of this step, so that a skipped step has none.
        """
        if transfer.can_read(finite.device):
            return self
        skipped = dict(_IF_SKIPPED)
        if threshold_moves:
            skipped["threshold"] = math.nan
        numbers: dict[str, Any] = {}
        for name, if_skipped in skipped.items():
            numbers[name] = torch.where(finite, getattr(self, name), if_skipped)
        return replace(self, finite=finite, **numbers)


def is_finite(norm: Tensor) -> Tensor:
    """Return whether a norm is finite, by one operation: no norm is negative, and NaN not less."""
    return norm < math.inf


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
