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
    value, unit = duration.value, duration.unit
    if unit == "ba":
        return value
    if unit == "tok":
        if tokens_per_sample is None:
            return None
        value = math.ceil(value / tokens_per_sample)
    if samples_per_epoch is None:
        return None if unit == "ep" else math.ceil(value / samples_per_step)
    epochs, rest = (value, 0) if unit == "ep" else divmod(value, samples_per_epoch)
    return epochs * math.ceil(samples_per_epoch / samples_per_step) + math.ceil(
        rest / samples_per_step
    )
