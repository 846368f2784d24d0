"""What is measured before a clipping mode decides, and what it decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from runner.gradients import transfer
from runner.gradients.layout import Layout
from runner.gradients.norms import Powers, combine, combine_norms, powers_of
from runner.gradients.transfer import Number

_NAN = math.nan
_IF_SKIPPED: dict[str, Any] = {
    "norm_clipped": _NAN,
    "coef": _NAN,
    "max_stat": _NAN,
    "clipped": 0.0,
    "fraction": 0.0,
}


class Split(NamedTuple):
    """Norms of what a coefficient multiplies and leaves out, see :meth:`Layout.leave_unscaled`."""

    scaled: Number
    unscaled: Number


@dataclass(frozen=True, slots=True)
class GradStats:
    """Measurements of a final gradient, the same on every rank.

    Attributes:
        norm: ‖G‖ of the gradient.
        finite: whether ``norm`` is finite: a bool, or a 0-dimensional tensor where only the
            accelerator knows. Cleared for a step that a skip rule leaves out.
        powers: share of each gradient of this rank; None where it was not measured.
        work: what a mode measured besides, in the same read, see :meth:`ClipMode.measure`.
        split: norms of what a coefficient multiplies and of what it leaves out, where it does.
        part: True if ``norm`` counts only the gradients that a coefficient multiplies.
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
        """Measure the gradients of ``layout``: one small collective if it spans ranks.

        With ``each`` there are ``powers``; as on an accelerator, and where ‖G‖ is not finite.
        """
        power, powers = powers_of(layout, *layout.gradients(), norm_type, each or split)
        if not split:
            return cls.measured(combine(layout.gather([power])[0], norm_type), powers)
        assert powers is not None
        wide = transfer.widest(layout.device)
        nothing = torch.zeros(1, dtype=wide, device=layout.device)  # where there is no gradient
        shares = torch.cat([powers.each.to(nothing), nothing])
        scales = layout.constant("scaled", powers.shards, lambda shard: shard.scaled)
        scaled = torch.cat([scales, nothing]) > 0
        parts = torch.stack([shares.where(scaled, 0.0), shares.where(~scaled, 0.0)])
        sums = parts.amax(1) if math.isinf(norm_type) else parts.sum(1)
        of_scaled, of_unscaled = layout.gather([transfer.read(power) for power in sums])
        norm = combine([*of_scaled, *of_unscaled], norm_type)
        norms = Split(
            scaled=combine(of_scaled, norm_type),
            unscaled=combine(of_unscaled, norm_type),
        )
        return replace(cls.measured(norm, powers), split=norms)

    @classmethod
    def measured(cls, norm: Number, powers: Powers | None, work: Any = None) -> GradStats:
        """Return the measurements that a mode has made itself."""
        return cls(norm, transfer.is_finite(norm), powers, work)


@dataclass(frozen=True, slots=True)
class Parts:
    """What this rank changes, in a mode that clips parts: elements, units or tensors."""

    changed: Number  # parts on this rank that are above λ, each divided by its num_replicas
    total: Number  # parts on this rank, each divided by its num_replicas
    work: Sequence[Any]  # what the mode needs to change them
    power: Number | None = None  # share of ‖G‖^p after clipping; None: read the gradients again


@dataclass(frozen=True, slots=True)
class Decision:
    """What a mode does to the gradient of one step, and what it measured to decide that.

    All numbers are floats on a CPU and 0-dimensional tensors on an accelerator (a λ that does not
    change is a float there too). A decision without ``parts`` is complete: applying it multiplies
    every gradient by ``coef``, or each gradient by its own factor of ``scales``; a fused optimizer
    step may multiply by ``coef`` instead. A decision with ``parts`` is completed by
    :meth:`ClipMode.apply`, because the norm after clipping and the counts of other ranks travel in
    one collective. Until then ``max_stat`` covers this rank alone, and the four values before it
    are NaN.

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
        parts: what this rank has to change; None where ``coef`` or ``scales`` says all.
        norm_scaled: norm before clipping of the gradients that are multiplied, where
            :meth:`Layout.leave_unscaled` names others, which is compared with λ; else None.
        scales: factor of each of ``layout.names``, [parameters], on the device of the layout and
            the same on every rank; None where all have the same one.
        inner: decisions of the modes inside of this one, where it has any.
        total: number of parts that ``fraction`` is a share of; 1 for a mode that clips steps.
        update: what the mode does to the optimizer's update in :meth:`ClipMode.after_step`, if
            anything.
        spike: 1 if a :class:`SkipRule` skips the step, which clears ``finite`` too, else 0.
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
    norm_scaled: Number | None = None
    scales: Tensor | None = None
    inner: tuple[Inner, ...] = ()
    total: Number = 1.0
    update: Any = None
    spike: Number = 0.0

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
    def untouched(
        cls, norm: Number, threshold: Number | None, max_stat: Number, total: Number = 1.0
    ) -> Decision:
        """Decide to leave a finite gradient as it is."""
        return cls(
            norm=norm,
            norm_clipped=norm,
            coef=1.0,
            clipped=0.0,
            fraction=0.0,
            max_stat=max_stat,
            threshold=_NAN if threshold is None else threshold,
            total=total,
        )

    @classmethod
    def skipped(cls, norm: Number, threshold: Number | None) -> Decision:
        """Describe a step that is not taken because its gradient is not finite."""
        return cls(norm, **_IF_SKIPPED, threshold=threshold or _NAN, finite=False)

    @classmethod
    def change_parts(
        cls, norm: Number, threshold: Number, max_stat: Number, parts: Parts
    ) -> Decision:
        """Decide to change ``parts``; ``max_stat`` is the largest value on this rank."""
        return cls(
            norm=norm,
            norm_clipped=_NAN,
            coef=_NAN,
            clipped=_NAN,
            fraction=_NAN,
            max_stat=max_stat,
            threshold=threshold,
            parts=parts,
        )

    @classmethod
    def of_share(
        cls,
        norm: Number,
        after: Number,
        share: Number,
        max_stat: Number,
        limit: Number,
        total: Number,
        **more: Any,
    ) -> Decision:
        """Decide to clip a ``share`` of ``total`` parts, which every rank knows."""
        if not isinstance(share, Tensor) and share == 0.0:
            # The same number twice, not a quotient of two that were rounded differently.
            return cls.untouched(norm, limit, max_stat, total)
        coef = more.pop("coef") if "coef" in more else transfer.ratio(after, norm)
        return cls(
            norm=norm,
            norm_clipped=after,
            coef=coef,
            clipped=share.sign() if isinstance(share, Tensor) else 1.0,
            fraction=share,
            max_stat=max_stat,
            threshold=limit,
            total=total,
            **more,
        )

    def of_whole(self, layout: Layout, norm: Number, split: Split, norm_type: float) -> Decision:
        """Return a decision on the gradients of ``split.scaled`` as one on the whole gradient."""
        if self.parts is not None:
            return replace(self, norm=norm)
        after = combine_norms([self.coef * split.scaled, split.unscaled], norm_type)
        after = transfer.where(self.coef != 1.0, after, norm)
        whole = replace(self, norm=norm, norm_clipped=after, norm_scaled=split.scaled)
        if not isinstance(self.coef, Tensor) and self.coef == 1.0:
            return whole
        scales = torch.where(layout.scaled, transfer.on_device([self.coef], layout.device), 1.0)
        return replace(whole, coef=transfer.ratio(after, norm), scales=scales)

    def if_finite(self, finite: bool | Tensor) -> Decision:
        """Return this decision, or a skipped one if the device finds that it is not ``finite``."""
        if not isinstance(finite, Tensor):
            return self
        if self.parts is not None:
            return replace(self, finite=finite)
        skipped = dict(_IF_SKIPPED)
        if isinstance(self.threshold, Tensor):  # A λ that moves belongs to this step.
            skipped["threshold"] = _NAN
        numbers: dict[str, Any] = {}
        for name, if_skipped in skipped.items():
            numbers[name] = transfer.where(finite, getattr(self, name), if_skipped)
        return replace(self, finite=finite, **numbers)

    def complete(self, layout: Layout, norm_type: float) -> Decision:
        """Fill in the numbers of all ranks once the parts of ``layout`` were changed.

        Counts, maxima and the norm travel in one collective, which runs whatever this rank changed.
        """
        assert self.parts is not None
        norm = self.norm
        limit = self.threshold
        changed = self.parts.changed
        total = self.parts.total
        power = self.parts.power
        if layout.group is None and not isinstance(changed, Tensor) and changed == 0:
            return Decision.untouched(norm, limit, self.max_stat, total)
        if power is None:
            power, _ = powers_of(layout, *layout.gradients(), norm_type)
        powers, changes, totals, maxima = layout.gather([power, changed, total, self.max_stat])
        after = combine(powers, norm_type)
        max_stat = combine(maxima, math.inf)
        # The shares of all ranks add up to a whole number, apart from rounding.
        counts: list[Number] = [sum(changes), sum(totals)]
        share: Number
        every: Number
        if isinstance(norm, Tensor):
            count, parts = transfer.on_device(counts, norm.device).round()
            share = count / parts.clamp(min=1.0)
            every = parts
            # The same number twice, where they were measured in different ways.
            after = torch.where(count > 0, after, norm)
        else:
            every = round(float(counts[1]))
            share = round(float(counts[0])) / max(every, 1)
        return Decision.of_share(norm, after, share, max_stat, limit, every).if_finite(self.finite)


class Inner(NamedTuple):
    """What a mode decided inside of another one: a link of a chain, or the mode of a group."""

    kind: Literal["link", "group"]
    name: str
    decision: Decision
