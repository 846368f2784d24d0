"""Mode ``schedule``: another mode clips, with a λ that is a function of the optimizer step.

``λ_t = threshold · warm-up factor(t) · decay(t)``, where t counts the steps that were decided, from
0. A step that is skipped counts too: the host knows its number without waiting for an accelerator.
OLMo's warm-up is ``warmup=constant`` (``grad_clip_warmup_steps`` in
https://github.com/allenai/OLMo).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from runner.clip import ClipMode, Decision, GradStats, Layout, nested
from runner.config.modes import Schedule


@dataclass(eq=False)
class ScheduleClip(Schedule, ClipMode):
    """Set λ of another mode, ``inner``, for each step, and let it measure, decide and apply."""

    initial_history: ClassVar = {"step": 0}

    inner: ClipMode = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.inner = nested.made(self.of, self, threshold=self.threshold)
        super().__post_init__()
        self._set_limit()

    def bind(self, layout: Layout) -> None:
        nested.bind(self.inner, layout, "of")

    @property
    def may_fold(self) -> bool:
        return self.inner.may_fold

    def measure(self, layout: Layout, each: bool = False) -> GradStats:
        self._set_limit()  # the mode may look for what is above λ
        return self.inner.measure(layout, each)

    def decide(self, layout: Layout, stats: GradStats) -> Decision:
        self._set_limit()
        self.history["step"] = self._step + 1
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
        return int(self.history["step"])

    def _factor(self, step: int) -> float:
        """Return λ ÷ threshold of a step."""
        if step < self.warmup_steps:
            share = step / self.warmup_steps if self.warmup == "linear" else 0.0
            return self.warmup_factor + (1.0 - self.warmup_factor) * share
        if self.decay == "constant" or self.steps is None:
            return 1.0
        share = min((step - self.warmup_steps) / self.steps, 1.0)
        left = 1.0 - share if self.decay == "linear" else (1.0 + math.cos(math.pi * share)) / 2
        return self.end_factor + (1.0 - self.end_factor) * left
