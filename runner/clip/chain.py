"""Mode ``chain``: several modes in order, each of which clips what the one before has left.

A chain of one mode is that mode, to the bit. Where a link scales the gradient, or each tensor, the
next one decides by scaled norms: gradients are read once, and multiplied once at the end. After a
link that clips elements or units, gradients are read again. A step that is not finite is skipped by
all links, and no history changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runner.clip import ClipMode, Decision, GradStats, Layout, Number, Parts
from runner.clip.layout import OptionError
from runner.clip.mode import scale, scale_each
from runner.clip.nested import NestedMode, bind
from runner.clip.per_parameter import TensorMode, TensorNorms
from runner.config.modes import Chain


@dataclass(eq=False)
class ChainClip(Chain, NestedMode):
    """Clip by one mode after the other."""

    kind = "link"

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

    def scales_some(self, layout: Layout) -> bool:
        whole = all(mode.info.parts is None for mode in self._links)
        return whole and super().scales_some(layout)

    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        return self._measuring(0).measure(layout, each)

    def _measuring(self, number: int) -> ClipMode:
        """Return the link whose measurement is enough for link ``number`` and those after it.

        Norms of tensors are enough for links that need ‖G‖ alone.
        """
        for mode in self._links[number:]:
            if isinstance(mode, TensorMode):
                return mode
            if type(mode).measure is not ClipMode.measure:
                break
        return self._links[number]

    @torch.no_grad()
    def decide_finite(self, layout: Layout, stats: GradStats) -> Decision:
        decisions, factor = self._decide(layout, stats, ())
        if len(decisions) == len(self._links) and decisions[-1].parts is None:
            return self._whole(decisions, factor)
        nan = math.nan
        work = Parts(nan, nan, (decisions, factor))
        return Decision.change_parts(decisions[0].norm, nan, nan, work)

    def _decide(
        self, layout: Layout, stats: GradStats, before: Sequence[Decision]
    ) -> tuple[list[Decision], Number | Tensor]:
        """Let the next links decide, until gradients have to be changed before another one can."""
        decisions, factor = [*before], 1.0
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
            elif isinstance(factor, Tensor) and factor.ndim:
                scale_each(layout, factor)
            else:
                scale(layout, factor)
            if number == len(self._links):
                whole, finite = self._whole(decisions, None), decision.finite
                return whole.where(finite) if isinstance(finite, Tensor) else whole
            # Clamping makes an infinite gradient finite, but its step is skipped all the same.
            stats = GradStats(decisions[-1].norm_clipped, decision.finite)
            measuring = self._measuring(number)
            if not measuring.decides_by(stats):
                stats = replace(measuring.measure(layout), finite=decision.finite)
            decisions, factor = self._decide(layout, stats, decisions)

    def _whole(self, decisions: Sequence[Decision], factor: Any) -> Decision:
        norms = decisions[0].norm, decisions[-1].norm_clipped
        named = dict(zip(self.modes, decisions, strict=True))
        if isinstance(factor, Tensor) and factor.ndim:
            return self.together(*norms, named, scales=factor)
        return self.together(*norms, named, coef=factor)


MODE = ChainClip
