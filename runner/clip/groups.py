"""Groups of parameters that are measured and clipped by themselves, each by a mode of its own.

:class:`ParameterGroups` clips by one mode what is in no group of its own: a parameter group of an
optimizer may be left out (``"clip": False``) or have a threshold of its own (``"clip": 0.5``), and
modes that scale the whole gradient leave out the matrices of Muon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from runner.clip.decision import Decision, Inner
from runner.clip.mode import ClipMode, build
from runner.gradients import Layout, ParamShard
from runner.gradients.norms import FALSE, Norms, combine_norms, is_finite, powers_of, root


class Group(NamedTuple):
    """Parameters that are clipped together."""

    name: str
    mode: ClipMode | ParameterGroups
    layout: Layout

    @property
    def clips(self) -> bool:
        return self.mode.info.clips is not None


class Groups:
    """Groups of the parameters of a layout. The norm of a group counts its own parameters."""

    def __init__(self, layout: Layout, norm_type: float) -> None:
        self.layout = layout
        self._norm_type = norm_type
        self.groups: list[Group] = []

    def measure(self, each: bool) -> Norms:
        """Measure each group; ``work`` has what was measured, in the order of the groups."""
        modes = [group.mode for group in self.groups]
        if len(modes) > 1 and all(mode.reads == "norm" for mode in modes):
            measured = self._measure_norms(each)
        else:
            measured = [group.mode.measure(group.layout, each) for group in self.groups]
        p = self._norm_type
        totals = [norms.total for norms in measured]
        total = combine_norms(totals, p) if len(totals) > 1 else totals[0]
        shards: list[ParamShard] = []
        shares: Tensor | None = None
        finite = is_finite(total)
        if each or finite is FALSE or all(norms.shares is not None for norms in measured):
            shards, shares = self._shares(measured)
        return Norms(total, finite, p, shards, shares, measured)

    def _measure_norms(self, each: bool) -> list[Norms]:
        """Measure the norms of all groups, with one collective for all of them."""
        p = self._norm_type
        powers = []
        measured = []
        for group in self.groups:
            shards, gradients = group.layout.gradients()
            power, shares = powers_of(group.layout, shards, gradients, p, each)
            powers.append(power)
            measured.append((shards, shares))
        sums_or_maxima = {"maxima": powers} if math.isinf(p) else {"sums": powers}
        norms = []
        for power, (shards, shares) in zip(
            self.layout.totals(**sums_or_maxima), measured, strict=True
        ):
            total = root(power, p)
            norms.append(Norms(total, is_finite(total), p, shards, shares))
        return norms

    def _shares(self, measured: Sequence[Norms]) -> tuple[list[ParamShard], Tensor]:
        """Return the shares of the gradients of all groups; those that are missing are measured.

        No collective measures them: other ranks may have them all, or need none.
        """
        shards: list[ParamShard] = []
        shares: list[Tensor] = [torch.empty(0, device=self.layout.device)]
        for group, norms in zip(self.groups, measured, strict=True):
            of_group, shares_of_group = norms.shards, norms.shares
            if shares_of_group is None:
                of_group, gradients = group.layout.gradients()
                _, shares_of_group = powers_of(
                    group.layout, of_group, gradients, self._norm_type, each=True
                )
            assert shares_of_group is not None
            shards += of_group
            shares.append(shares_of_group)
        return shards, torch.cat(shares)

    def clip(self, norms: Norms) -> list[Decision]:
        """Clip each group, on all ranks in the same order; a step that is not finite by none."""
        measured = norms.work
        if not (isinstance(measured, list) and len(measured) == len(self.groups)):
            measured = self.measure(each=False).work
        return [
            group.mode.clip(group.layout, replace(of_group, finite=norms.finite))
            for group, of_group in zip(self.groups, measured, strict=True)
        ]

    def norm_clipped(self, decisions: Sequence[Decision]) -> Tensor:
        """Return ‖G‖ of all groups after clipping."""
        return combine_norms([decision.norm_clipped for decision in decisions], self._norm_type)


def leaves_out(mode: ClipMode, layout: Layout) -> bool:
    """Return whether a mode leaves out matrices of ``layout`` that Muon orthogonalizes.

    They count in ‖G‖, but not in the norm that is compared with λ: no coefficient would bring a
    norm that contains them to λ, and their size would decide how far others are scaled down.
    """
    return bool(layout.orthogonalized) and mode.scales == "auto" and mode.scales_whole


def require_own_clips(mode: ClipMode, layout: Layout) -> None:
    """Refuse a setting of a parameter group that the mode cannot follow.

    Raises:
        ValueError: the mode has no threshold that is the same in each step, or limits updates.
    """
    name = type(mode).__name__
    info = mode.info
    for clip in layout.own_clips:
        if info.needs_optimizer:
            raise ValueError(
                f"{clip.group} has a clip of its own, but {name} limits what the optimizer does "
                "with all parameters: leave it out, or use clip=norm"
            )
        moves = info.follows is not None or mode.limit_moves
        if clip.threshold is not None and (moves or not info.takes_threshold):
            raise ValueError(
                f"{clip.group} has clip={clip.threshold:g}, but {name} takes no threshold of a "
                "parameter group: use clip=norm, value, adaptive or per_parameter, or clip=groups"
            )


def by_parameter_groups(mode: ClipMode, layout: Layout) -> ClipMode | ParameterGroups:
    """Return what clips a model by a mode: the mode itself, where it clips all parameters.

    Raises:
        ValueError: see :func:`require_own_clips`.
    """
    require_own_clips(mode, layout)
    if layout.own_clips or leaves_out(mode, layout):
        return ParameterGroups(mode, layout)
    return mode


class ParameterGroups:
    """A mode that leaves out some parameters, or clips them by thresholds of their own.

    What the mode remembers stays with it. The decision on the whole gradient has λ and the value
    that is compared with it of the parameters without a setting of their own.
    """

    reads = "gradient"

    def __init__(self, mode: ClipMode, layout: Layout) -> None:
        self.mode = mode
        self.info = mode.info
        mode.bind(layout)  # patterns of its options are for the whole model
        self._groups = Groups(layout, mode.norm_type)
        left_out = set(layout.orthogonalized) if leaves_out(mode, layout) else set()
        with_threshold: set[str] = set()
        groups: list[Group] = []
        for clip in layout.own_clips:
            if clip.threshold is None:
                left_out |= clip.names
            else:
                with_threshold |= clip.names
                part = layout.restricted(clip.names)
                groups.append(
                    Group(clip.group, part_with_threshold(mode, part, clip.threshold), part)
                )
        left_out -= with_threshold
        remaining = {*layout.names} - left_out - with_threshold
        self._main = self._of_main(layout.restricted(remaining))
        self._groups.groups = [self._main, *groups]
        if left_out:
            none = build("none", norm_type=mode.norm_type)
            self._groups.groups.append(Group("unclipped", none, layout.restricted(left_out)))

    def _of_main(self, layout: Layout) -> Group:
        mode = self.mode
        if not layout.names and mode.info.parts is not None:
            mode = build("none", norm_type=mode.norm_type)
        elif mode.info.by_tensor and not mode.memory and not mode.info.nested:
            mode = mode.of_part(layout)
        else:
            mode.bind(layout)
        return Group("main", mode, layout)

    @torch.no_grad()
    def measure(self, layout: Layout, each: bool = False) -> Norms:
        main = self._main.mode
        if isinstance(main, ClipMode) and main is not self.mode and self._main.clips:
            main.threshold = self.mode.threshold
            main.tally = self.mode.tally
        return self._groups.measure(each)

    @torch.no_grad()
    def clip(self, layout: Layout, norms: Norms | None = None) -> Decision:
        """Clip each group in place; return a decision on the whole gradient."""
        measured = self.measure(layout) if norms is None else norms
        decisions = self._groups.clip(measured)
        clipping = [
            (group, decision)
            for group, decision in zip(self._groups.groups, decisions, strict=True)
            if group.clips or group is self._main
        ]
        main = decisions[0]
        fraction = main.fraction
        total = main.total
        if len(clipping) > 1:
            parts = [torch.ones_like(fraction) * decision.total for _, decision in clipping]
            fractions = [decision.fraction for _, decision in clipping]
            total = torch.stack(parts).sum()
            fraction = (torch.stack(parts) * torch.stack(fractions)).sum() / total.clamp(min=1.0)
        after = self._groups.norm_clipped(decisions)
        inner = [Inner("group", group.name, decision) for group, decision in clipping[1:]]
        return replace(
            main,
            norm=measured.total,
            factor=None,
            scales=None,
            # The same number twice, not a quotient of two that were rounded differently.
            after=torch.where(fraction > 0, after, measured.total),
            parts_clipped=fraction,
            largest=main.max_stat,
            total=total,
            norm_scaled=main.norm if self.mode.scales_whole else None,
            inner=(*main.inner, *inner),
        )


def part_with_threshold(mode: ClipMode, part: Layout, threshold: float) -> ClipMode:
    """Return a mode for some parameters with a threshold of their own."""
    of_part = mode.of_part(part)
    of_part.threshold = threshold
    return of_part


def mode_of_parameter(mode: ClipMode, part: Layout) -> ClipMode:
    """Return the mode for the one parameter of ``part``, which the backward pass clips."""
    for clip in part.own_clips:
        if clip.threshold is None:
            return build("none", norm_type=mode.norm_type)
        return part_with_threshold(mode, part, clip.threshold)
    return mode.of_part(part)
