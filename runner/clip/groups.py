"""Mode ``groups``: groups of parameters are measured and clipped by themselves.

The norm of a group is that of its parameters alone. ‖G‖, which is reported, is that of the whole
model. A gradient that is not finite in one group skips the step of all, and no history changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from runner.clip import ClipMode, Decision, GradStats, Layout, Number, Parts, build, transfer
from runner.clip.layout import OptionError
from runner.clip.nested import NestedMode, bind
from runner.clip.norms import Powers, combine_norms, powers_of
from runner.config.modes import ByGroups

REST = "rest"  # name of the parameters that no pattern matches


class _Group(NamedTuple):
    """Parameters that are clipped together, their positions, and those of the scaled ones."""

    name: str
    mode: ClipMode
    layout: Layout
    at: Tensor
    scaled: Tensor


@dataclass(eq=False)
class GroupsClip(ByGroups, NestedMode):
    """Clip each group of parameters by a mode of its own."""

    kind = "group"
    _layout: Layout | None = field(default=None, init=False, repr=False)
    _bound: list[_Group] = field(default_factory=list, init=False, repr=False)

    def bind(self, layout: Layout) -> None:
        self._layout, self._bound = layout, []
        left = dict.fromkeys(layout.names)
        for pattern, mode in self.modes.items():
            names = [name for name in layout.matching(pattern, "groups") if name in left]
            if not names and pattern != "*":
                text = f"clip.groups: {pattern} matches only parameters that patterns before it do"
                raise OptionError("groups", f"{text}; put it before them, or leave it out")
            self._add(layout, pattern, mode, names)
            for name in names:
                del left[name]
        self._add(layout, REST, build("none", norm_type=self.norm_type), [*left])

    def _add(self, layout: Layout, name: str, mode: ClipMode, names: Sequence[str]) -> None:
        if names:
            own = layout if len(names) == len(layout.names) else layout.restricted(names)
            bind(mode, own, f"groups.{name}")
            scaled = [each for each in own.names if own.parameters[each].scaled]
            at, some = (
                transfer.on_device([layout.positions[each] for each in kind], layout.device).long()
                for kind in (own.names, scaled)
            )
            self._bound.append(_Group(name, mode, own, at, some))

    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        if self._layout is not layout:
            self.bind(layout)
        p, found = self.norm_type, [g.mode.measure(g.layout, each) for g in self._bound]
        norm = found[0].norm
        if len(found) > 1:
            norm = combine_norms([stats.norm for stats in found], p)
        powers = None
        if each or any(stats.powers is not None for stats in found):
            pairs = zip(self._bound, found, strict=True)
            parts = [
                s.powers or powers_of(*g.layout.gradients(), p, each=True)[1] for g, s in pairs
            ]
            held = [part for part in parts if part is not None and part.shards]
            shards = [shard for part in held for shard in part.shards]
            each_of = torch.cat([part.each for part in held]) if held else torch.empty(0)
            powers = Powers(shards, each_of, p)
        return GradStats.measured(norm, powers, found)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide for each group, from what was measured of it."""
        work = stats.work if self._layout is layout else None
        if not (isinstance(work, list) and len(work) == len(self._bound)):
            work = self.measure(layout).work
        decisions = [
            group.mode.decide(group.layout, replace(own, finite=stats.finite))
            for group, own in zip(self._bound, work, strict=True)
        ]
        if all(decision.parts is None for decision in decisions):
            return self._whole(stats.norm, decisions, self._scales(layout, decisions))
        nan = math.nan
        return Decision.change_parts(stats.norm, nan, nan, Parts(nan, nan, decisions))

    def _scales(self, layout: Layout, decisions: Sequence[Decision]) -> Tensor:
        """Return the factor of each parameter, [parameters]."""
        wide = transfer.widest(layout.device)
        scales = torch.ones(len(layout.names), dtype=wide, device=layout.device)
        for group, decision in zip(self._bound, decisions, strict=True):
            if decision.scales is not None:
                scales.index_copy_(0, group.at, decision.scales)
            elif decision.factor is not None:
                scales.index_fill_(0, group.scaled, decision.factor)
            else:
                scales.index_fill_(0, group.at, decision.coef)
        return scales

    @torch.no_grad()
    def change_parts(self, layout: Layout, decision: Decision) -> Decision:
        """Apply the decision of each group, on all ranks in the same order."""
        assert decision.parts is not None
        pairs = zip(self._bound, decision.parts.work, strict=True)
        decisions = [group.mode.apply(group.layout, own) for group, own in pairs]
        whole, finite = self._whole(decision.norm, decisions), decision.finite
        return whole.where(finite) if isinstance(finite, Tensor) else whole

    def _whole(
        self, norm: Number, decisions: Sequence[Decision], scales: Tensor | None = None
    ) -> Decision:
        """Return the decision of all groups: the share clipped is that of the groups that clip."""
        named = {group.name: own for group, own in zip(self._bound, decisions, strict=True)}
        after = combine_norms([own.norm_clipped for own in decisions], self.norm_type)
        clipping = [named[g.name].clipped for g in self._bound if g.mode.info.clips is not None]
        share = sum(clipping, 0.0) / max(len(clipping), 1)
        return self.together(norm, after, named, scales=scales, fraction=share)


MODE = GroupsClip
