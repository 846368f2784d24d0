"""How far a run has come, and how many steps a duration takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from runner.config.duration import Duration

if TYPE_CHECKING:
    from runner.config.schema import RunConfig

_COUNTS = {"ep": "epoch", "ba": "step", "sp": "samples", "tok": "tokens"}
"""The count of :class:`Progress` that a unit of durations is measured by."""


class Progress(NamedTuple):
    """Counts since the start of a run, and the position in the data.

    Attributes:
        epoch: complete passes over the data.
        batch: microbatches that each rank has read in the current epoch.
        step: optimizer steps, including skipped ones.
        samples: samples read by all data-parallel ranks.
        tokens: tokens read by all data-parallel ranks, without ignored ones.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    tokens: int = 0

    def after(self, batches: int, samples: int, tokens: int, end_of_epoch: bool) -> Progress:
        """Return the counts after one more optimizer step.

        Args:
            batches: microbatches that each rank reads in the step.
            samples: samples that all ranks read.
            tokens: tokens that all ranks read.
            end_of_epoch: whether the step reads the last microbatch of the epoch.
        """
        return Progress(
            self.epoch + end_of_epoch,
            0 if end_of_epoch else self.batch + batches,
            self.step + 1,
            self.samples + samples,
            self.tokens + tokens,
        )

    def of(self, unit: str) -> int:
        """Return the count that durations of ``unit`` are measured by."""
        count: int = getattr(self, _COUNTS[unit])
        return count

    def reached(self, duration: Duration) -> bool:
        """Return whether ``duration`` has passed since the start of the run."""
        return self.of(duration.unit) >= duration.value

    def completed(self, interval: Duration, since: Progress) -> bool:
        """Return whether an interval has ended after ``since``; the first begins with the run."""
        unit, length = interval.unit, interval.value
        return self.of(unit) // length > since.of(unit) // length


def steps_of(
    config: RunConfig,
    samples: int | None,
    data_size: int,
    *,
    tokens_per_sample: int | None = None,
    duration: Duration | None = None,
) -> int | None:
    """Return the number of optimizer steps of a run; None if it cannot be known.

    Args:
        config: the whole configuration.
        samples: number of training samples; None for a stream, whose end alone tells it.
        data_size: number of data-parallel ranks.
        tokens_per_sample: number of tokens of a sample; None for data without tokens.
        duration: duration to count instead of that of the whole run.
    """
    microbatch = config.data.batch_size * data_size
    if config.data.drop_last and samples is not None:
        samples -= samples % microbatch
    return total_steps(
        duration or config.train.max_duration,
        None if samples is None else max(samples, 1),
        microbatch * config.accumulation.steps,
        tokens_per_sample,
    )


def total_steps(
    duration: Duration,
    samples_per_epoch: int | None,
    samples_per_step: int,
    tokens_per_sample: int | None = None,
) -> int | None:
    """Return the number of optimizer steps in ``duration``; the last of an epoch may be short.

    Args:
        duration: duration to count.
        samples_per_epoch: number of samples in one pass; None if it is not known. A duration in
            samples or tokens then takes as many steps as if the first pass were long enough.
        samples_per_step: microbatch size x data-parallel ranks x microbatches of a window.
        tokens_per_sample: number of tokens of a sample; None for data without tokens.

    Returns:
        The number, or None for a duration in tokens of data that has none, and for one in epochs
        of unknown length. Where tokens are ignored a duration in tokens takes more steps than this.
    """
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
    """Return how many steps lie between printed lines, so that every evaluation gets a line.

    Args:
        evaluation: steps between evaluations; None if unknown.
        least: desired number of steps between lines.

    Returns:
        The quotient of ``evaluation`` and a whole number that is nearest to ``least``, rounded up;
        ``evaluation`` itself if that is smaller.
    """
    if evaluation is None:
        return least
    return math.ceil(evaluation / max(1, round(evaluation / least)))
