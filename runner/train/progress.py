"""How far a run has come, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from runner.config.duration import Duration


@dataclass
class Progress:
    """Counts since the start of a run, over all data-parallel ranks.

    Attributes:
        epoch: passes over the data that are complete.
        step: optimizer steps, skipped ones included.
        samples: samples read.
        tokens: tokens read that were not ignored.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    tokens: int = 0

    def advance(self, samples: int, tokens: int, end_of_epoch: bool) -> None:
        """Count one optimizer step."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens
        self.epoch += end_of_epoch

    def of(self, unit: str) -> int:
        """The count that durations of ``unit`` are measured by."""
        counts = {"ep": self.epoch, "ba": self.step, "sp": self.samples, "tok": self.tokens}
        return counts[unit]

    def reached(self, duration: Duration) -> bool:
        """Whether ``duration`` has passed since the start."""
        return self.of(duration.unit) >= duration.value


class Every:
    """Says when another ``interval`` has passed."""

    def __init__(self, interval: Duration) -> None:
        self.interval = interval
        self._seen = 0

    def due(self, progress: Progress) -> bool:
        """Whether an interval has ended since the last call."""
        passed = progress.of(self.interval.unit) // self.interval.value
        due, self._seen = passed > self._seen, passed
        return due


def total_steps(
    duration: Duration,
    samples_per_epoch: int,
    samples_per_step: int,
    tokens_per_sample: int | None = None,
) -> int | None:
    """Optimizer steps that ``duration`` takes; the last step of an epoch may be a short one.

    Args:
        duration: of the run.
        samples_per_epoch: samples of one pass.
        samples_per_step: microbatch x data-parallel ranks x microbatches of a window.
        tokens_per_sample: for durations in tokens.

    Returns:
        The number, or None for a duration in tokens of data that has none. Where tokens are ignored
        a duration in tokens takes more steps than this.
    """
    per_epoch = math.ceil(samples_per_epoch / samples_per_step)
    samples = duration.value
    match duration.unit:
        case "ba":
            return duration.value
        case "ep":
            return duration.value * per_epoch
        case "tok" if tokens_per_sample is None:
            return None
        case "tok":
            samples = math.ceil(duration.value / (tokens_per_sample or 1))
    epochs, rest = divmod(samples, samples_per_epoch)
    return epochs * per_epoch + math.ceil(rest / samples_per_step)


def steps_between_lines(evaluation: int | None, least: int) -> int:
    """Steps between printed lines such that every evaluation falls on a line: one rhythm.

    Args:
        evaluation: steps between evaluations; None if that is not known.
        least: about how many steps lie between lines.

    Returns:
        An even part of ``evaluation`` near ``least``, rounded up; all of it where that is less.
    """
    if evaluation is None:
        return least
    return math.ceil(evaluation / max(1, round(evaluation / least)))


class Window(NamedTuple):
    """The microbatches of one optimizer step.

    Attributes:
        first: number of its first microbatch in the epoch.
        batches: up to ``accumulation.steps`` of them; fewer at the end of an epoch.
        last: whether the epoch ends with it.
    """

    first: int
    batches: list[Any]
    last: bool


def windows(loader: Any, steps: int) -> Iterator[Window]:
    """The windows of one pass over ``loader``.

    One window is read ahead, so that the last one is known without asking a loader for its length.
    """
    batches = iter(loader)
    first, upcoming = 0, list(islice(batches, steps))
    while upcoming:
        now, upcoming = upcoming, list(islice(batches, steps))
        yield Window(first, now, last=not upcoming)
        first += len(now)
