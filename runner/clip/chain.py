"""Mode ``chain``: several modes in order, each of which clips what the one before has left.

A chain of one mode is that mode, to the bit. Where a link scales the gradient, or each tensor, the
next one decides by scaled norms: gradients are read once, and multiplied once at the end. After a
link that clips elements or units, gradients are read again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from runner.clip.decision import Decision, GradStats, Parts
from runner.clip.layout import Layout, OptionError
from runner.clip.mode import ClipMode, scale, scale_each
from runner.clip.nested import bind, load_states, made, state_of, together
from runner.clip.tensors import TensorMode, TensorNorms
from runner.clip.transfer import Number
from runner.config.modes import Chain

_ONE: Number | Tensor = 1.0


@dataclass(frozen=True)
class _Progress:
    """Links that have decided, while gradients have to be changed before the next one can.

    Attributes:
        decisions: what each of them decided, the last one with parts where it has any.
        factor: factor that no gradient was multiplied by yet, or one for each parameter.
    """

    decisions: Sequence[Decision]
    factor: Number | Tensor


@dataclass(eq=False)
class ChainClip(Chain, ClipMode):
    """Clip by one mode after the other.

    A step that is not finite is skipped by all of them, and no history changes.
    """

    modes: list[ClipMode] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            raise ValueError("a chain takes no threshold: each of its links has one")
        if not self.links:
            raise ValueError("a chain needs at least one link")
        self.modes = [made(f"links.{i}", one, self) for i, one in enumerate(self.links)]

    def bind(self, layout: Layout) -> None:
        """Bind each link to ``layout``."""
        kinds = {mode.info.parts is None for mode in self.modes}
        if layout.partly_scaled and self.scales == "auto" and len(kinds) > 1:
            raise OptionError(
                "scales",
                "clip.scales=auto leaves out gradients of this optimizer where one coefficient "
                "scales all, which a chain with links that clip parts cannot do; use all",
            )
        for number, mode in enumerate(self.modes):
            bind(mode, layout, f"links.{number}")

    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        """Measure, in one read, what the first links decide by."""
        return self._measuring(0).measure(layout, each)

    def scales_some(self, layout: Layout) -> bool:
        """Return whether the links scale some gradients only: if none of them clips parts."""
        whole = all(mode.info.parts is None for mode in self.modes)
        return whole and super().scales_some(layout)

    def _measuring(self, number: int) -> ClipMode:
        """Return the link whose measurement is enough for the link ``number`` and those after it.

        Norms of tensors are enough for links that need ‖G‖ alone.
        """
        for mode in self.modes[number:]:
            if isinstance(mode, TensorMode):
                return mode
            if type(mode).measure is not ClipMode.measure:
                break
        return self.modes[number]

    def decide(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide for each link; a chain of one decides as its link."""
        if len(self.modes) > 1:
            return super().decide(layout, stats)
        decision = self.modes[0].decide(layout, stats)
        inner = () if decision.finite is False else (decision.as_inner("link", 0),)
        return replace(decision, inner=inner)

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        """Decide for the first links, as far as no gradient has to be changed in between."""
        progress = self._decide(layout, stats, ())
        decisions = progress.decisions
        if len(decisions) == len(self.modes) and decisions[-1].parts is None:
            return self._whole(decisions, progress.factor)
        nan = math.nan
        return Decision.change_parts(decisions[0].norm, nan, nan, Parts(nan, nan, [progress]))

    def _decide(self, layout: Layout, stats: GradStats, before: Sequence[Decision]) -> _Progress:
        """Let links decide after those of ``before``, given what was measured after these."""
        decisions, factor = [*before], _ONE
        for mode in self.modes[len(before) :]:
            if len(decisions) > len(before) and not mode.decides_by(stats):
                break
            decision = mode.decide(layout, stats)
            decisions.append(decision)
            if decision.parts is not None:
                break
            by = decision.coef if decision.scales is None else decision.scales
            tensors = stats.work.scaled(by) if isinstance(stats.work, TensorNorms) else None
            stats = replace(stats, norm=decision.norm_clipped, powers=None, work=tensors)
            factor = factor * by
        return _Progress(decisions, factor)

    @property
    def may_fold(self) -> bool:
        """Whether a step may multiply the gradients; for a chain of one as its link says."""
        return len(self.modes) > 1 or self.modes[0].may_fold

    def apply(self, layout: Layout, decision: Decision) -> Decision:
        """Change the gradients in place; a chain of one does it as its link."""
        if len(self.modes) > 1:
            return super().apply(layout, decision)
        done = self.modes[0].apply(layout, replace(decision, inner=()))
        return replace(done, inner=decision.inner and (done.as_inner("link", 0),))

    @torch.no_grad()
    def change_parts(self, layout: Layout, decision: Decision) -> Decision:
        """Apply what was decided, and go on with the next links until all have clipped."""
        assert decision.parts is not None
        [progress] = decision.parts.work
        while True:
            decisions = [*progress.decisions]
            number = len(decisions)
            if decisions[-1].parts is not None:
                decisions[-1] = self.modes[number - 1].apply(layout, decisions[-1])
            elif isinstance(progress.factor, Tensor) and progress.factor.ndim:
                scale_each(layout, progress.factor)
            else:
                scale(layout, progress.factor)
            if number == len(self.modes):
                whole = self._whole(decisions, None)
                finite = decision.finite
                return whole.where(finite) if isinstance(finite, Tensor) else whole
            # Clamping makes an infinite gradient finite, but its step is skipped all the same.
            stats = GradStats(decisions[-1].norm_clipped, decision.finite)
            measuring = self._measuring(number)
            if not measuring.decides_by(stats):
                stats = replace(measuring.measure(layout), finite=decision.finite)
            progress = self._decide(layout, stats, decisions)

    def _whole(self, decisions: Sequence[Decision], factor: Number | Tensor | None) -> Decision:
        """Return the decision of all links."""
        each = isinstance(factor, Tensor) and factor.ndim > 0
        return together(
            decisions[0].norm,
            decisions[-1].norm_clipped,
            [decision.as_inner("link", i) for i, decision in enumerate(decisions)],
            coef=None if each else factor,
            scales=factor if each else None,  # type: ignore[arg-type]
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each link."""
        return super().state_dict() | {"links": state_of(self._named)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; a link whose mode has changed begins anew."""
        super().load_state_dict(state)
        load_states(self._named, state.get("links", {}))

    @property
    def _named(self) -> dict[str, ClipMode]:
        return {str(number): mode for number, mode in enumerate(self.modes)}


MODE = ChainClip
