"""How far a training has come, in epochs, steps, samples and tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

from runner.config.notation import Duration

_COUNTS = {"ep": "epoch", "ba": "step", "sp": "samples", "tok": "tokens"}  # by unit of durations


class Progress(NamedTuple):
    """Where a training stands: counts of what is behind it, ``batch`` within its epoch."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    tokens: int = 0

    def after(self, batches: int, samples: int, tokens: int, end_of_epoch: bool) -> Progress:
        """Return where the training stands after one more step, of so much data."""
        return Progress(
            self.epoch + end_of_epoch,
            0 if end_of_epoch else self.batch + batches,
            self.step + 1,
            self.samples + samples,
            self.tokens + tokens,
        )

    def of(self, unit: str) -> int:
        """Return the count in a unit of durations: ``ep``, ``ba``, ``sp`` or ``tok``."""
        return int(getattr(self, _COUNTS[unit]))

    def reached(self, duration: Duration) -> bool:
        """Return whether the training has come as far as a duration from its beginning."""
        return self.of(duration.unit) >= duration.value

    def completed(self, interval: Duration, since: Progress) -> bool:
        """Return True if an interval has ended since another point of the training."""
        intervals = self.of(interval.unit) // interval.value
        return intervals > since.of(interval.unit) // interval.value


def total_steps(duration: Duration, epoch: int | None, step: int, tokens: int | None) -> int | None:
    """Return the steps in ``duration``, given samples of an epoch and a step, tokens of a sample.

    The last step of an epoch may be short.
    """
    value = duration.value
    unit = duration.unit
    if unit == "ba":
        return value
    if unit == "tok":
        if tokens is None:
            return None
        value = math.ceil(value / tokens)
    if epoch is None:
        return None if unit == "ep" else math.ceil(value / step)
    if unit == "ep":
        return value * math.ceil(epoch / step)
    epochs, samples = divmod(value, epoch)
    return epochs * math.ceil(epoch / step) + math.ceil(samples / step)
