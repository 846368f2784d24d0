"""Microbatches of an optimizer step: one number, or one for each phase of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from runner.config.notation import Duration

AUTO = "auto"

_FORM = "must be an integer, auto, or phases such as {0:1,1000ba:2,4000ba:8}"


@dataclass(frozen=True)
class AccumulationSteps:
    """Microbatches of an optimizer step, for each phase of a training.

    Attributes:
        counts: microbatches of a step in each phase.
        starts: where each phase but the first begins: rising durations in one unit.
    """

    counts: tuple[int, ...]
    starts: tuple[Duration, ...] = ()

    @classmethod
    def of(cls, steps: Any) -> AccumulationSteps:
        """Read a number, or a mapping such as ``{0: 1, "1000ba": 2}``.

        Raises:
            ValueError: it is neither, or its phases do not rise in one unit.
        """
        if isinstance(steps, cls):
            return steps
        if not isinstance(steps, Mapping):
            return cls((_count(steps),))
        starts = []
        for number, start in enumerate(steps):
            if number == 0 and str(start) != "0":
                raise ValueError(f"the first phase must begin at 0, not at {start}")
            if number > 0:
                starts.append(Duration.parse(start))
        if not steps:
            raise ValueError(_FORM)
        for before, start in pairwise(starts):
            if before.unit != start.unit or before.value >= start.value:
                raise ValueError(f"phases must rise in one unit, and {start} follows {before}")
        return cls(tuple(_count(count) for count in steps.values()), tuple(starts))

    @property
    def moves(self) -> bool:
        """Whether steps of a training have several numbers of microbatches."""
        return len(set(self.counts)) > 1

    @property
    def most(self) -> int:
        """Microbatches of the longest step."""
        return max(self.counts)

    def at(self, count_of: Callable[[str], int]) -> int:
        """Return the microbatches of a step that begins where a training stands.

        Args:
            count_of: returns how far it has come in a unit of durations.
        """
        begun = sum(count_of(start.unit) >= start.value for start in self.starts)
        return self.counts[begun]

    def times(self, size: int) -> str:
        """Return ``size`` times the microbatches of each phase, as text: ``8, from 1000ba 16``."""
        first, *later = (str(size * count) for count in self.counts)
        phases = [f"from {start} {text}" for start, text in zip(self.starts, later, strict=True)]
        return ", ".join([first, *phases])


def accumulation_value(steps: Any) -> Any:
    """Check a value of ``accumulation.steps``, and return it; a ValueError says what is wrong."""
    if steps != AUTO:
        AccumulationSteps.of(steps)
    return steps


def _count(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(_FORM)
    if value < 1:
        raise ValueError("must be at least 1")
    return value
