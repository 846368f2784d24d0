"""Which samples ``data.leave_out`` names, and from where on they are not read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any

from runner.config.accumulation import AccumulationSteps
from runner.config.leave_out import LeaveOut
from runner.config.notation import first_few
from runner.data.order import LeftOut, PartitionedBatches
from runner.data.samples import origin
from runner.train.progress import Progress

NO_INDICES = "the samples of a stream have no indices: it needs a data set that has a length"
IN_TOKENS = (
    "phases of accumulation.steps in tokens do not tell the samples of a step: name the samples, "
    "as data.leave_out.samples=[17]"
)


def left_out_from(
    asked: LeaveOut, loader: Any, progress: Progress, accumulation: AccumulationSteps
) -> LeftOut:
    """Return what is left out from ``progress`` on, the same on every rank.

    Args:
        asked: steps and samples.
        loader: of ``prepare_dataloader``, for the whole run: its order has to be the one of the run
            without ``data.leave_out``.
        progress: where the training stands.
        accumulation: microbatches of its steps.

    Raises:
        ValueError: the data has no indices, or not these.
    """
    order = getattr(loader, "batch_sampler", None)
    if not isinstance(order, PartitionedBatches):
        raise ValueError(f"data.leave_out: {NO_INDICES}")
    positions = set(positions_of(asked.samples_left_out, loader.dataset))
    if asked.steps:
        positions |= _read_in(asked.steps_left_out, order, accumulation)
    start = progress.batch * order.batch_size * order.world_size
    return LeftOut(progress.epoch, start, tuple(sorted(positions)))


def positions_of(samples: Collection[int], dataset: Any) -> Iterator[int]:
    """Yield where the data set, which may be a share of another one, has these samples.

    Raises:
        ValueError: it does not have one of them.
    """
    if not samples:
        return
    missing = set(samples)
    _, indices = origin(dataset, range(len(dataset)))
    for position, index in enumerate(indices):
        if index in samples:
            missing.discard(index)
            yield position
    if missing:
        names = first_few([str(sample) for sample in sorted(missing)])
        raise ValueError(f"the training data has no sample {names}")


def _read_in(
    steps: Collection[int], order: PartitionedBatches, accumulation: AccumulationSteps
) -> set[int]:
    """Return the positions of the samples that these steps of a whole run read, on all ranks."""
    if any(start.unit == "tok" for start in accumulation.starts):
        raise ValueError(f"data.leave_out: {IN_TOKENS}")
    order = copy.copy(order)
    positions: set[int] = set()
    last = max(steps)
    for progress, microbatches in _walk(order, accumulation.at):
        if progress.step >= last:
            return positions
        if progress.step + 1 in steps:
            for number in microbatches:
                for part in order.parts(number):
                    positions.update(part)
    return positions


def _walk(
    order: PartitionedBatches, microbatches_at: Callable[[Callable[[str], int]], int]
) -> Iterator[tuple[Progress, range]]:
    """Yield where each step of a run begins, and its microbatches; ``order`` is at their epoch."""
    progress = Progress()
    while True:
        order.set_epoch(progress.epoch)
        first = progress.batch
        end = min(first + microbatches_at(progress.of), len(order))
        yield progress, range(first, end)
        samples = order.samples_before(end) - order.samples_before(first)
        progress = progress.after(end - first, samples, 0, end_of_epoch=end == len(order))
