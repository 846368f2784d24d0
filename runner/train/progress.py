"""How far a run has come, and how many steps a duration takes."""

from __future__ import annotations

import math
from typing import NamedTuple

from runner.config.duration import Duration

_COUNTS = {"ep": "epoch", "ba": "step", "sp": "samples", "tok": "tokens"}
"""The count of :class:`Progress` that a unit of durations is measured by."""


class Progress(NamedTuple):
    """Counts since the start of a run, and the position in the data."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    tokens: int = 0

    def after(self, batches: int, samples: int, tokens: int, end_of_epoch: bool) -> Progress:
        return Progress(
            self.epoch + end_of_epoch,
            0 if end_of_epoch else self.batch + batches,
            self.step + 1,
            self.samples + samples,
            self.tokens + tokens,
        )

    def of(self, unit: str) -> int:
        count: int = getattr(self, _COUNTS[unit])
        return count

    def reached(self, duration: Duration) -> bool:
        return self.of(duration.unit) >= duration.value

    def completed(self, interval: Duration, since: Progress) -> bool:
        unit, length = interval.unit, interval.value
        return self.of(unit) // length > since.of(unit) // length


def total_steps(
    duration: Duration,
    samples_per_epoch: int | None,
    samples_per_step: int,
    tokens_per_sample: int | None = None,
) -> int | None:
    """Return the number of optimizer steps in ``duration``; the last of an epoch may be short."""
    samples = duration.value
    per_epoch = None
    if samples_per_epoch is not None:
        per_epoch = math.ceil(samples_per_epoch / samples_per_step)
    match duration.unit:
        case "ba":
            return duration.value
        case "ep":
            return None if per_epoch is None else duration.value * per_epoch
        case "tok" if tokens_per_sample is None:
            return None
        case "tok":
            samples = math.ceil(duration.value / (tokens_per_sample or 1))
    if samples_per_epoch is None or per_epoch is None:
        return math.ceil(samples / samples_per_step)
    epochs, rest = divmod(samples, samples_per_epoch)
    return epochs * per_epoch + math.ceil(rest / samples_per_step)


def steps_between_lines(evaluation: int | None, least: int) -> int:
    """Return how many steps lie between printed lines, so that every evaluation gets a line."""
    if evaluation is None:
        return least
    return math.ceil(evaluation / max(1, round(evaluation / least)))
