"""Mode ``groups``: groups of parameters are measured and clipped by themselves.

The norm of a group is that of its parameters alone. ‖G‖, which is reported, is that of the whole
model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.decision import Decision, GradStats, Parts
from runner.clip.layout import Layout, OptionError
from runner.clip.mode import ClipMode, build
from runner.clip.nested import bind, load_states, made, state_of, together
from runner.clip.norms import Powers, combine, local_powers
from runner.clip.transfer import Number
from runner.config.modes import ByGroups

REST = "rest"
"""Name of the parameters that no pattern matches."""


class _Group(NamedTuple):
    """Parameters that are clipped together.

    Attributes:
        name: the pattern, or :data:`REST`.
        mode: how they are clipped, bound to ``layout``.
        layout: where they live: their part of the layout of the model.
        at: their positions in the names of the layout of the model.
        scaled: positions of those that one coefficient multiplies, see
            :meth:`Layout.leave_unscaled`.
    """

    name: str
    mode: ClipMode
    layout: Layout
    at: Tensor
    scaled: Tensor


@dataclass(eq=False)
class GroupsClip(ByGroups, ClipMode):
    """Clip each group of parameters by a mode of its own.

    A gradient that is not finite in one group skips the step of all, and no history changes.
    """

    modes: dict[str, ClipMode] = field(default_factory=dict, init=False, repr=False)
    _layout: Layout | None = field(default=None, init=False, repr=False)
    _bound: list[_Group] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            raise ValueError("mode groups takes no threshold: each of the groups has one")
        if not self.groups:
            raise ValueError("mode groups needs at least one pattern of parameter names")
        self.modes = {
            pattern: made(f"groups.{pattern}", given, self)
            for pattern, given in self.groups.items()
        }

    def bind(self, layout: Layout) -> None:
        """Divide the parameters of ``layout``, and bind the mode of each group to its own."""
        self._layout, self._bound = layout, []
        left = dict.fromkeys(layout.names)
        for pattern, mode in self.modes.items():
            names = [name for name in layout.matching(pattern, "groups") if name in left]
            if not names and pattern != "*":
                text = f"clip.groups: {pattern} matches only parameters that patterns before it do"
                raise OptionError("groups", f"{text}; put it before them, or leave it out")
            self._add(pattern, mode, names)
            for name in names:
                del left[name]
        self._add(REST, build("none", norm_type=self.norm_type), [*left])

    def _add(self, name: str, mode: ClipMode, names: Sequence[str]) -> None:
        layout = self._layout
        assert layout is not None
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
        """Measure each group by what its mode decides by; ‖G‖ follows from their norms."""
        if self._layout is not layout:
            self.bind(layout)
        found = [group.mode.measure(group.layout, each) for group in self._bound]
        if len(found) == 1:
            return found[0]
        norm = self._combined([stats.norm for stats in found])
        finite = torch.isfinite(norm) if isinstance(norm, Tensor) else math.isfinite(norm)
        return GradStats(norm, finite, self._powers(found, each), found)

    def _combined(self, norms: Sequence[Number]) -> Number:
        """Return ‖G‖, given the norm of each group."""
        p = self.norm_type
        return combine(norms if math.isinf(p) else [norm**p for norm in norms], p)

    def _powers(self, found: Sequence[GradStats], each: bool) -> Powers | None:
        """Return the share of each gradient of this rank, where any group has measured it."""
        p = self.norm_type
        if not each and all(stats.powers is None for stats in found):
            return None
        parts = [
            stats.powers or local_powers(group.layout, p, each=True)[1]
            for group, stats in zip(self._bound, found, strict=True)
        ]
        known = [part for part in parts if part is not None]
        shards = [*chain.from_iterable(part.shards for part in known)]
        values = [part.each for part in known if len(part.shards)]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if tensors:
            return Powers(shards, torch.cat(tensors), p)
        return Powers(shards, [*chain.from_iterable(values)], p)

    def decide(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide for each group; one group with all parameters decides as its mode."""
        if self._layout is not layout:
            self.bind(layout)
        if len(self._bound) > 1:
            return super().decide(layout, stats)
        [group] = self._bound
        decision = group.mode.decide(layout, stats)
        inner = () if decision.finite is False else (decision.as_inner("group", group.name),)
        return replace(decision, inner=inner)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide for each group, from what was measured of it."""
        measured = (
            stats.work if _measured(stats.work, len(self._bound)) else self.measure(layout).work
        )
        decisions = [
            group.mode.decide(group.layout, replace(own, finite=stats.finite))
            for group, own in zip(self._bound, measured, strict=True)
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
            elif isinstance(decision.coef, Tensor) or decision.coef != 1.0:
                scales.index_fill_(0, group.at, decision.coef)
        return scales

    @property
    def may_fold(self) -> bool:
        """Whether a step may multiply the gradients; for one group as its mode says."""
        return len(self._bound) > 1 or all(group.mode.may_fold for group in self._bound)

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        """Change the gradients in place; one group with all parameters does it as its mode."""
        if len(self._bound) > 1:
            return super().apply(layout, decision)
        [group] = self._bound
        done = group.mode.apply(layout, replace(decision, inner=()))
        return replace(done, inner=decision.inner and (done.as_inner("group", group.name),))

    @torch.no_grad()
    def change_parts(self, layout: Layout, decision: Decision) -> Decision:
        """Apply the decision of each group. All ranks do, in the same order."""
        assert decision.parts is not None
        decisions = [
            group.mode.apply(group.layout, own)
            for group, own in zip(self._bound, decision.parts.work, strict=True)
        ]
        whole = self._whole(decision.norm, decisions)
        finite = decision.finite
        return whole.where(finite) if isinstance(finite, Tensor) else whole

    def _whole(
        self, norm: Number, decisions: Sequence[Decision], scales: Tensor | None = None
    ) -> Decision:
        """Return the decision of all groups: the share clipped is that of the groups that clip."""
        pairs = [*zip(self._bound, decisions, strict=True)]
        clipping = [own.clipped for group, own in pairs if group.mode.info.clips is not None]
        count: Number = sum(clipping)
        return together(
            norm,
            self._combined([decision.norm_clipped for decision in decisions]),
            [own.as_inner("group", group.name) for group, own in pairs],
            scales=scales,
            fraction=count / max(len(clipping), 1),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each group's mode."""
        return super().state_dict() | {"groups": state_of(self.modes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; a group whose mode has changed begins anew."""
        super().load_state_dict(state)
        load_states(self.modes, state.get("groups", {}))


def _measured(work: Any, groups: int) -> bool:
    """Return whether ``work`` is what was measured of each group."""
    return isinstance(work, list) and len(work) == groups


MODE = GroupsClip
