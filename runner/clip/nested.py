"""Modes that hold other modes: ``chain``, ``groups`` and ``schedule``.

A chain is several modes in order: each mode clips the result of the mode before it. Where all links
decide on factors by the same norms, gradients are read once and multiplied once, by the product.
Where a link changes gradients itself, or needs more than was measured, each link clips at once.

Groups of parameters are measured and clipped by themselves. The norm of a group counts its own
parameters; the reported ‖G‖ counts the whole model.

A chain of one mode, or one group of all parameters, is that mode, to the bit. A step that is not
finite is skipped by all, and no memory changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from runner.clip import ClipMode, Decision, FactorMode, Norms, build
from runner.clip.decision import Inner
from runner.clip.groups import Group, Groups, ParameterGroups, leaves_out
from runner.clip.patterns import matching
from runner.clip.per_parameter import TensorNorms
from runner.config.modes import ByGroups, Chain, Mode, Schedule, inner_mode
from runner.config.problem import NOTHING
from runner.gradients import Layout
from runner.gradients.layout import OptionError

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
            Inner(self.kind, name, replace(decision, scales=None))
            for name, decision in decisions.items()
        )
        if len(inner) == 1:
            return replace(*decisions.values(), inner=inner)
        scales = by if by is not None and by.ndim else None
        clipped = torch.stack([decision.clipped for decision in decisions.values()]).amax()
        none = torch.full_like(norm, math.nan)
        return Decision(
            norm=norm,
            threshold=none,
            factor=None if by is None or by.ndim else by,
            scales=scales,
            # The same number twice, not a quotient of two that were rounded differently.
            after=torch.where(clipped > 0, after, norm),
            parts_clipped=clipped if fraction is None else fraction,
            largest=none,
            inner=inner,
        )

    def memories(self) -> list[dict[str, Any]]:
        memories = super().memories()
        for mode in self.modes.values():
            memories += mode.memories()
        return memories

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
class ChainClip(Chain, NestedMode, FactorMode):
    """Clip by one mode after the other."""

    kind = "link"
    by_norm_alone = True  # if its links are

    @property
    def _links(self) -> list[ClipMode]:
        return list(self.modes.values())

    def bind(self, layout: Layout) -> None:
        kinds = {mode.info.parts is None for mode in self._links}
        if layout.orthogonalized and self.scales == "auto" and len(kinds) > 1:
            raise OptionError(
                "scales",
                "clip.scales=auto leaves out gradients of this optimizer where one coefficient "
                "scales all, which a chain with links that clip parts cannot do; use all",
            )
        for name, mode in self.modes.items():
            bind(mode, layout, f"links.{name}")

    @property
    def reads(self) -> Literal["norm", "tensors", "gradient"]:
        if self.by_factors and self.by_norm_alone:
            return self._links[0].reads
        return "gradient"

    @property
    def scales_whole(self) -> bool:
        return all(mode.scales_whole for mode in self._links)

    def measure(self, layout: Layout, each: bool = False) -> Norms:
        return self._links[0].measure(layout, each)

    @property
    def by_factors(self) -> bool:
        """Whether each link can decide before the gradients are changed by those before it."""
        if not all(link.by_factors for link in self._links):
            return False
        reads = [link.reads for link in self._links]
        measured = {"norm", "tensors"} if reads[0] == "tensors" else {"norm"}
        return measured.issuperset(reads[1:])

    @torch.no_grad()
    def decide_finite(self, layout: Layout, norms: Norms) -> Decision:
        """Let each link decide by norms that the links before it have scaled."""
        decisions = []
        factor = layout.number(1.0)
        for link in self._links:
            assert isinstance(link, FactorMode)
            decision = link.decide(layout, norms)
            decisions.append(decision)
            by = decision.factor if decision.scales is None else decision.scales
            assert by is not None
            factor = factor * by
            tensors = norms.work.scaled(by) if isinstance(norms.work, TensorNorms) else None
            norms = Norms(decision.norm_clipped, norms.finite, work=tensors)
        return self._whole(decisions, factor)

    @torch.no_grad()
    def clip_finite(self, layout: Layout, norms: Norms) -> Decision:
        """Let each link clip what the links before it have left."""
        if self.by_factors:
            return super().clip_finite(layout, norms)
        decisions: list[Decision] = []
        finite = norms.finite
        for link in self._links:
            if decisions and link.reads != "norm":
                norms = link.measure(layout)
            # Clamping makes an infinite gradient finite, but its step is skipped all the same.
            decision = link.clip(layout, replace(norms, finite=finite))
            decisions.append(decision)
            norms = Norms(decision.norm_clipped, finite)
        return self._whole(decisions, None)

    def _whole(self, decisions: Sequence[Decision], factor: Any) -> Decision:
        named = dict(zip(self.modes, decisions, strict=True))
        return self.together(decisions[0].norm, decisions[-1].norm_clipped, named, factor)


@dataclass(eq=False)
class GroupsClip(ByGroups, NestedMode):
    """Clip each group of parameters by a mode of its own."""

    kind = "group"
    _groups: Groups | None = field(default=None, init=False, repr=False)

    def bind(self, layout: Layout) -> None:
        self._groups = Groups(layout, self.norm_type)
        remaining = dict.fromkeys(layout.names)
        for pattern, mode in self.modes.items():
            names = [name for name in matching(layout, pattern, "groups") if name in remaining]
            if not names and pattern != "*":
                text = f"clip.groups: {pattern} matches only parameters that patterns before it do"
                raise OptionError("groups", f"{text}; put it before them, or leave it out")
            self._add(self._groups, pattern, mode, names)
            for name in names:
                del remaining[name]
        self._add(self._groups, REST, build("none", norm_type=self.norm_type), [*remaining])

    def _add(self, groups: Groups, name: str, mode: ClipMode, names: Sequence[str]) -> None:
        if names:
            layout = groups.layout
            part = layout if len(names) == len(layout.names) else layout.restricted(names)
            bind(mode, part, f"groups.{name}")
            clipper = ParameterGroups(mode, part) if leaves_out(mode, part) else mode
            groups.groups.append(Group(name, clipper, part))

    def _bound_to(self, layout: Layout) -> Groups:
        if self._groups is None or self._groups.layout is not layout:
            self.bind(layout)
        assert self._groups is not None
        return self._groups

    def measure(self, layout: Layout, each: bool = False) -> Norms:
        return self._bound_to(layout).measure(each)

    @torch.no_grad()
    def clip_finite(self, layout: Layout, norms: Norms) -> Decision:
        """Clip each group; ``fraction`` is the share of clipping groups that clipped."""
        groups = self._bound_to(layout)
        decisions = groups.clip(norms)
        by_name = {}
        clipped = []
        for group, decision in zip(groups.groups, decisions, strict=True):
            by_name[group.name] = decision
            if group.clips:
                clipped.append(decision.clipped)
        share = torch.stack(clipped).mean() if clipped else torch.zeros_like(norms.total)
        after = groups.norm_clipped(decisions)
        return self.together(norms.total, after, by_name, fraction=share)


@dataclass(eq=False)
class ScheduleClip(Schedule, FactorMode):
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
    def reads(self) -> Literal["norm", "tensors", "gradient"]:
        return self.inner.reads if self.by_norm_alone else "gradient"

    def measure(self, layout: Layout, each: bool = False) -> Norms:
        self._set_limit()  # the mode may look for what is above λ
        return self.inner.measure(layout, each)

    def decide(self, layout: Layout, norms: Norms) -> Decision:
        assert isinstance(self.inner, FactorMode)
        self._begin_step()
        return self.inner.decide(layout, norms)

    @property
    def by_factors(self) -> bool:
        return self.inner.by_factors

    def clip(self, layout: Layout, norms: Norms | None = None) -> Decision:
        self._begin_step()
        return self.inner.clip(layout, norms)

    def decide_finite(self, layout: Layout, norms: Norms) -> Decision:
        assert isinstance(self.inner, FactorMode)
        return self.inner.decide_finite(layout, norms)

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        assert isinstance(self.inner, FactorMode)
        return self.inner.apply(layout, decision)

    def memories(self) -> list[dict[str, Any]]:
        return super().memories() + self.inner.memories()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.inner.load_state_dict(state["inner"])

    def _begin_step(self) -> None:
        self._set_limit()
        self.memory["step"] = self._step + 1

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
