"""Modes that hold other modes: ``chain``, ``groups`` and ``schedule``.

A chain is several modes in order: each mode clips the result of the mode before it. Where a link
scales the gradient, or each tensor, the next link decides by scaled norms: gradients are read once,
and multiplied once at the end. They are read again for a link that needs more than was measured.

Groups of parameters are measured and clipped by themselves. The norm of a group counts its own
parameters; the reported ‖G‖ counts the whole model.

A chain of one mode, or one group of all parameters, is that mode, to the bit. A step that is not
finite is skipped by all, and no memory changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from runner.clip import ClipMode, Decision, GradStats, Parts, build
from runner.clip.decision import Inner, ratio
from runner.clip.mode import scale, scale_each
from runner.clip.per_parameter import TensorNorms
from runner.config.modes import ByGroups, Chain, Mode, Schedule, inner_mode
from runner.config.problem import NOTHING
from runner.gradients import Layout, ParamShard, transfer
from runner.gradients.layout import OptionError
from runner.gradients.norms import Powers, combine_norms, powers_of

REST = "rest"  # name of the parameters that no pattern matches


def build_inner(configured: Any, outer: Mode, **options: Any) -> ClipMode:
    """Make a mode inside of another one."""
    mode = inner_mode(configured, **options)
    return build(mode, norm_type=outer.norm_type, scales=outer.scales)


def bind(mode: ClipMode, layout: Layout, where: str) -> None:
    """Bind a mode inside of another one, whose option ``where`` has it."""
    try:
        mode.bind(layout)
    except OptionError as error:
        option = f"{where}.{error.option}"
        value = getattr(mode, error.option) if error.value is NOTHING else error.value
        message = str(error).replace(f"clip.{error.option}", f"clip.{option}")
        raise OptionError(option, message, value) from None


def change_by_inner(norm: Tensor, work: Any) -> Decision:
    """Decide that inner modes change parts, which counts nothing until they have done so."""
    none = torch.full_like(norm, math.nan)
    return Decision.change_parts(norm, None, none, Parts(none, none, work))


@dataclass(eq=False)
class NestedMode(ClipMode):
    """A mode that holds others, by the option ``info.nested``, and has no λ of its own."""

    kind: ClassVar[Literal["link", "group"]]
    modes: dict[str, ClipMode] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        configured = getattr(self, self.info.nested)
        if not isinstance(configured, Mapping):
            configured = {str(number): mode for number, mode in enumerate(configured)}
        self.modes = {name: build_inner(mode, self) for name, mode in configured.items()}

    def together(
        self,
        norm: Tensor,
        after: Tensor,
        decisions: Mapping[str, Decision],
        by: Tensor | None = None,  # a coefficient, or one for each parameter
        fraction: Tensor | None = None,
    ) -> Decision:
        """Combine the decisions of the modes, by name; a single mode's decision stays as it is."""
        inner = tuple(
            Inner(self.kind, name, replace(decision, parts=None, scales=None))
            for name, decision in decisions.items()
        )
        if len(inner) == 1:
            return replace(*decisions.values(), inner=inner)
        scales = by if by is not None and by.ndim else None
        clipped = torch.stack([decision.clipped for decision in decisions.values()]).amax()
        # The same number twice, not a quotient of two that were rounded differently.
        after = torch.where(clipped > 0, after, norm)
        none = torch.full_like(norm, math.nan)
        return Decision(
            norm=norm,
            norm_clipped=after,
            coef=ratio(after, norm) if by is None or by.ndim else by,
            clipped=clipped,
            fraction=clipped if fraction is None else fraction,
            max_stat=none,
            threshold=none,
            scales=scales,
            inner=inner,
        )

    def state_dict(self) -> dict[str, Any]:
        states = {
            name: {"class": type(mode).__name__, **mode.state_dict()}
            for name, mode in self.modes.items()
        }
        return super().state_dict() | {self.info.nested: states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; a mode inside of this one whose class has changed begins anew."""
        super().load_state_dict(state)
        states = state.get(self.info.nested, {})
        for name, mode in self.modes.items():
            if states.get(name, {}).get("class") == type(mode).__name__:
                mode.load_state_dict(states[name])


@dataclass(eq=False)
class ChainClip(Chain, NestedMode):
    """Clip by one mode after the other."""

    kind = "link"
    by_norm_alone = True  # if its links are

    @property
    def may_fold(self) -> bool:
        return self.by_norm_alone and all(mode.may_fold for mode in self._links)

    @property
    def _links(self) -> list[ClipMode]:
        return list(self.modes.values())

    def bind(self, layout: Layout) -> None:
        kinds = {mode.info.parts is None for mode in self._links}
        if layout.partly_scaled and self.scales == "auto" and len(kinds) > 1:
            raise OptionError(
                "scales",
                "clip.scales=auto leaves out gradients of this optimizer where one coefficient "
                "scales all, which a chain with links that clip parts cannot do; use all",
            )
        for name, mode in self.modes.items():
            bind(mode, layout, f"links.{name}")

    def decides_by(self, stats: GradStats) -> bool:
        return self.by_norm_alone and all(mode.decides_by(stats) for mode in self._links)

    def scales_some(self, layout: Layout) -> bool:
        scale_whole_gradients = all(mode.info.parts is None for mode in self._links)
        return scale_whole_gradients and super().scales_some(layout)

    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        return self._links[0].measure(layout, each)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        decisions, factor = self._decide(layout, stats, ())
        if len(decisions) == len(self._links) and decisions[-1].parts is None:
            return self._whole(decisions, factor)
        return change_by_inner(decisions[0].norm, (decisions, factor))

    def _decide(
        self, layout: Layout, stats: GradStats, before: Sequence[Decision]
    ) -> tuple[list[Decision], Tensor]:
        """Let the next links decide, until gradients have to be changed before another one can."""
        decisions = [*before]
        factor = layout.number(1.0)
        for mode in self._links[len(before) :]:
            if len(decisions) > len(before) and not mode.decides_by(stats):
                break
            decision = mode.decide(layout, stats)
            decisions.append(decision)
            if decision.parts is not None:
                break
            by: Any = decision.coef if decision.scales is None else decision.scales
            tensors = stats.work.scaled(by) if isinstance(stats.work, TensorNorms) else None
            stats = replace(stats, norm=decision.norm_clipped, powers=None, work=tensors)
            factor = factor * by
        return decisions, factor

    @torch.no_grad()
    def change_parts(self, layout: Layout, decision: Decision) -> Decision:
        """Apply what was decided, and go on with the next links until all have clipped."""
        assert decision.parts is not None
        decisions, factor = decision.parts.work
        while True:
            number = len(decisions)
            if decisions[-1].parts is not None:
                decisions[-1] = self._links[number - 1].apply(layout, decisions[-1])
            elif factor.ndim:
                scale_each(layout, factor)
            else:
                scale(layout, factor)
            if number == len(self._links):
                return self._whole(decisions, None).if_finite(decision.finite)
            # Clamping makes an infinite gradient finite, but its step is skipped all the same.
            stats = GradStats(decisions[-1].norm_clipped, decision.finite)
            if not self._links[number].decides_by(stats):
                stats = replace(self._links[number].measure(layout), finite=decision.finite)
            decisions, factor = self._decide(layout, stats, decisions)

    def _whole(self, decisions: Sequence[Decision], factor: Any) -> Decision:
        named = dict(zip(self.modes, decisions, strict=True))
        return self.together(decisions[0].norm, decisions[-1].norm_clipped, named, factor)


class _Group(NamedTuple):
    """Parameters that are clipped together, and their positions in the whole layout."""

    name: str
    mode: ClipMode
    layout: Layout
    positions: Tensor


@dataclass(eq=False)
class GroupsClip(ByGroups, NestedMode):
    """Clip each group of parameters by a mode of its own."""

    kind = "group"
    _layout: Layout | None = field(default=None, init=False, repr=False)
    _bound: list[_Group] = field(default_factory=list, init=False, repr=False)

    def bind(self, layout: Layout) -> None:
        self._layout = layout
        self._bound = []
        remaining = dict.fromkeys(layout.names)
        for pattern, mode in self.modes.items():
            names = [name for name in layout.matching(pattern, "groups") if name in remaining]
            if not names and pattern != "*":
                text = f"clip.groups: {pattern} matches only parameters that patterns before it do"
                raise OptionError("groups", f"{text}; put it before them, or leave it out")
            self._add(layout, pattern, mode, names)
            for name in names:
                del remaining[name]
        self._add(layout, REST, build("none", norm_type=self.norm_type), [*remaining])

    def _add(self, layout: Layout, name: str, mode: ClipMode, names: Sequence[str]) -> None:
        if names:
            part = layout if len(names) == len(layout.names) else layout.restricted(names)
            bind(mode, part, f"groups.{name}")
            numbers = [layout.positions[parameter] for parameter in part.names]
            positions = transfer.on_device(numbers, layout.device).long()
            self._bound.append(_Group(name, mode, part, positions))

    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        if self._layout is not layout:
            self.bind(layout)
        measured = [group.mode.measure(group.layout, each) for group in self._bound]
        norms = [stats.norm for stats in measured]
        norm = combine_norms(norms, self.norm_type) if len(norms) > 1 else norms[0]
        powers = None
        if each or any(stats.powers is not None for stats in measured):
            powers = self._powers(measured)
        return GradStats.measured(norm, powers, measured)

    def _powers(self, measured: Sequence[GradStats]) -> Powers:
        """Return the powers of all groups; groups that have none are measured here."""
        p = self.norm_type
        shards: list[ParamShard] = []
        powers: list[Tensor] = []
        for group, stats in zip(self._bound, measured, strict=True):
            part = stats.powers
            if part is None:
                _, part = powers_of(group.layout, *group.layout.gradients(), p, each=True)
            if part is not None and part.shards:
                shards += part.shards
                powers.append(part.each)
        return Powers(shards, torch.cat(powers) if powers else torch.empty(0), p)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        work = stats.work if self._layout is layout else None
        if not (isinstance(work, list) and len(work) == len(self._bound)):
            work = self.measure(layout).work
        decisions = [
            group.mode.decide(group.layout, replace(of_group, finite=stats.finite))
            for group, of_group in zip(self._bound, work, strict=True)
        ]
        if all(decision.parts is None for decision in decisions):
            return self._whole(stats.norm, decisions, self._scales(layout, decisions))
        return change_by_inner(stats.norm, decisions)

    def _scales(self, layout: Layout, decisions: Sequence[Decision]) -> Tensor:
        """Return the factor of each parameter, [parameters]."""
        wide = transfer.widest(layout.device)
        scales = torch.ones(len(layout.names), dtype=wide, device=layout.device)
        for group, decision in zip(self._bound, decisions, strict=True):
            if decision.scales is not None:
                scales.index_copy_(0, group.positions, decision.scales)
            else:
                scales.index_fill_(0, group.positions, decision.coef)
        return scales

    @torch.no_grad()
    def change_parts(self, layout: Layout, decision: Decision) -> Decision:
        """Apply the decision of each group, on all ranks in the same order."""
        assert decision.parts is not None
        decisions = [
            group.mode.apply(group.layout, of_group)
            for group, of_group in zip(self._bound, decision.parts.work, strict=True)
        ]
        return self._whole(decision.norm, decisions).if_finite(decision.finite)

    def _whole(
        self, norm: Tensor, decisions: Sequence[Decision], scales: Tensor | None = None
    ) -> Decision:
        """Return the decision of all groups, with the share of clipping groups that clipped."""
        by_name = {}
        clipped = []
        for group, decision in zip(self._bound, decisions, strict=True):
            by_name[group.name] = decision
            if group.mode.info.clips is not None:
                clipped.append(decision.clipped)
        after = combine_norms([decision.norm_clipped for decision in decisions], self.norm_type)
        share = torch.stack(clipped).mean() if clipped else torch.zeros_like(norm)
        return self.together(norm, after, by_name, scales, share)


@dataclass(eq=False)
class ScheduleClip(Schedule, ClipMode):
    """Set λ of another mode, ``inner``, for each step, and let it measure, decide and apply.

    ``λ_t = threshold · warm-up factor(t) · decay(t)``, where t counts the steps that were decided,
    from 0, also those that are skipped: the host knows their number. OLMo's warm-up is
    ``warmup=constant`` (``grad_clip_warmup_steps`` in https://github.com/allenai/OLMo).
    """

    by_norm_alone = True  # if ``inner`` is
    initial_memory: ClassVar = {"step": 0}

    inner: ClipMode = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.inner = build_inner(self.of, self, threshold=self.threshold)
        super().__post_init__()
        self._set_limit()

    def bind(self, layout: Layout) -> None:
        bind(self.inner, layout, "of")

    @property
    def may_fold(self) -> bool:
        return self.by_norm_alone and self.inner.may_fold

    def decides_by(self, stats: GradStats) -> bool:
        return self.by_norm_alone and self.inner.decides_by(stats)

    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        self._set_limit()  # the mode may look for what is above λ
        return self.inner.measure(layout, each)

    def decide(self, layout: Layout, stats: GradStats) -> Decision:
        self._set_limit()
        self.memory["step"] = self._step + 1
        return self.inner.decide(layout, stats)

    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        return self.inner.decide_finite(layout, stats)

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        return self.inner.apply(layout, decision)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.inner.load_state_dict(state["inner"])

    def _set_limit(self) -> None:
        """Give the mode that clips λ of this step, and the tally that counts for this one."""
        self.inner.tally = self.tally
        self.inner.threshold = self.limit * self._factor(self._step)

    @property
    def _step(self) -> int:
        return int(self.memory["step"])

    def _factor(self, step: int) -> float:
        """Return λ ÷ threshold of a step."""
        if step < self.warmup_steps:
            share = step / self.warmup_steps if self.warmup == "linear" else 0.0
            return self.warmup_factor + (1.0 - self.warmup_factor) * share
        if self.decay == "constant" or self.steps is None:
            return 1.0
        share = min((step - self.warmup_steps) / self.steps, 1.0)
        remaining = 1.0 - share if self.decay == "linear" else (1.0 + math.cos(math.pi * share)) / 2
        return self.end_factor + (1.0 - self.end_factor) * remaining
