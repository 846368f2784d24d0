"""How far a training has come, in epochs, steps, samples and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from runner.config.accumulation import AccumulationSteps
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


class Length(NamedTuple):
    """How long a training is."""

    steps: int
    microbatches: int


def length(
    duration: Duration,
    epoch: int | None,
    microbatch: int,
    tokens: int | None,
    accumulation: AccumulationSteps,
) -> Length | None:
    """Return the length of a training; None if it is unknown.

    The last step of an epoch may be short.

    Args:
        duration: the duration of the training.
        epoch: samples of an epoch; None for a stream.
        microbatch: samples of a microbatch over all ranks.
        tokens: tokens of a sample; None if there are none.
        accumulation: microbatches of its steps.
    """
    marks = [duration, *accumulation.starts]
    units = {mark.unit for mark in marks}
    if (epoch is None and "ep" in units) or (tokens is None and "tok" in units) or epoch == 0:
        return None
    walk = _Walk(epoch, microbatch, tokens or 0)
    while not walk.progress.reached(duration):
        count = accumulation.at(walk.progress.of)
        ahead = [mark for mark in marks if not walk.progress.reached(mark)]
        if not (ahead == [duration] and walk.take_epochs(count, duration)):
            walk.take_steps(count, ahead)
    return Length(walk.progress.step, walk.microbatches)


class _Walk:
    """Counts the steps of a training, many at a time; ``within``: samples of the epoch so far."""

    def __init__(self, epoch: int | None, microbatch: int, tokens: int) -> None:
        self.progress = Progress()
        self.microbatches = 0
        self._within = 0
        self._epoch = epoch
        self._microbatch = microbatch
        self._tokens = tokens

    def take_steps(self, count: int, ahead: Sequence[Duration]) -> None:
        """Take steps of ``count`` microbatches up to a mark, or to the end of the epoch."""
        size = self._microbatch * count
        limits = []
        for mark in ahead:
            missing = mark.value - self.progress.of(mark.unit)
            in_step = {"ba": 1, "sp": size, "tok": size * self._tokens, "ep": 0}[mark.unit]
            if in_step:
                limits.append(math.ceil(missing / in_step))
        samples = size
        if self._epoch is not None:
            left = self._epoch - self._within
            limits.append(max(left // size, 1))
            samples = min(size, left)
        self._add(min(limits), samples)
        ended = self._within == self._epoch
        if ended:
            self._within = 0
            self.progress = self.progress._replace(epoch=self.progress.epoch + 1)

    def take_epochs(self, count: int, end: Duration) -> bool:
        """Take all whole epochs before the end; return False if there is none."""
        epoch = self._epoch
        if epoch is None or self._within:
            return False
        steps = math.ceil(epoch / (self._microbatch * count))
        of_epoch = {"ep": 1, "ba": steps, "sp": epoch, "tok": epoch * self._tokens}[end.unit]
        epochs = (end.value - self.progress.of(end.unit)) // of_epoch
        self.progress = Progress(
            self.progress.epoch + epochs,
            0,
            self.progress.step + epochs * steps,
            self.progress.samples + epochs * epoch,
            self.progress.tokens + epochs * epoch * self._tokens,
        )
        self.microbatches += epochs * math.ceil(epoch / self._microbatch)
        return epochs > 0

    def _add(self, steps: int, samples: int) -> None:
        """Add equal steps of so many samples."""
        progress = self.progress
        self._within += steps * samples
        self.microbatches += steps * math.ceil(samples / self._microbatch)
        self.progress = progress._replace(
            step=progress.step + steps,
            samples=progress.samples + steps * samples,
            tokens=progress.tokens + steps * samples * self._tokens,
        )
