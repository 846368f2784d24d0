"""Count the items of a window, and sum the counts over all ranks while the first microbatch runs.

What ranks ask of each other, to stop or to save, travels with the counts and costs no collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from runner.booster import Plugin
from runner.booster.loss import Count, WindowLoss
from runner.data.order import PartitionedBatches
from runner.data.stream import StreamLoader
from runner.data.stream_samples import checksum
from runner.train.windows import Window, Windows, has_no_sample

SAME_SAMPLES = (
    "all {} data-parallel ranks read the same first batch: use plugin.prepare_dataloader, a "
    "DistributedSampler, or a stream of this rank's samples alone"
)
OTHER_SAMPLES = (
    "the stream yields other samples on each rank, so that those which a rank does not keep are "
    "lost: set shards_itself = True in its class if it divides itself over ranks"
)
ENDED = (
    "the data of some of the {} data-parallel ranks has ended before that of the others: use "
    "plugin.prepare_dataloader, or let an IterableDataset yield equally many batches on each rank"
)


class Asked(NamedTuple):
    """What a rank asks of all ranks after this step."""

    stop: int = 0  # number of a signal, or 0
    save: bool = False


class Sums(NamedTuple):
    """What all ranks know of a window."""

    total: Count
    asked: Asked
    ends_epoch: bool


class Counts(NamedTuple):
    """The items of a window on this rank, and what waits for the sums over all ranks."""

    items: Sequence[float | None]
    """The items of each microbatch; None for one that this rank has no sample of."""
    over_ranks: Callable[[], Sums]


class _Totals(NamedTuple):
    """Whole numbers that are summed over ranks, besides the items."""

    samples: int = 0
    tokens: int = 0
    ended: int = 0  # ranks whose epoch ends with this window
    lengths: int = 0  # microbatches of the window
    squared_lengths: int = 0
    marks: int = 0  # checksums of the first samples
    squared_marks: int = 0
    stops: int = 0  # ranks that ask to stop
    saves: int = 0  # ranks that ask for a checkpoint


def count(
    window: Window, windows: Windows, loss: WindowLoss, plugin: Plugin, first: bool, asked: Asked
) -> Counts:
    """Count a window on the host, and start to sum the counts over all data-parallel ranks.

    Args:
        window: the microbatches of one optimizer step on this rank.
        windows: where they are read.
        loss: says which elements of a batch are items.
        plugin: the ranks.
        first: whether this is the first step: ranks then compare their samples.
        asked: what this rank asks of all ranks.
    """
    counts: list[Count | None] = []
    for number, batch in enumerate(window.batches, window.first):
        counts.append(None if has_no_sample(windows.loader, number) else loss.counted(batch))
    items = [None if counted is None else counted.items for counted in counts]
    local = _sum(counts)
    if plugin.world_size == 1:
        sums = Sums(local, asked, window.last)
        return Counts(items, lambda: sums)
    compares = first and plugin.data_size > 1
    mark = _mark_of(window, windows.loader) if compares else 0
    return Counts(items, _SumOverRanks(window, windows, loss, plugin, local, asked, mark).wait)


class _SumOverRanks:
    """The sum of the counts of a window over all ranks; a collective that starts at once."""

    def __init__(
        self,
        window: Window,
        windows: Windows,
        loss: WindowLoss,
        plugin: Plugin,
        local: Count,
        asked: Asked,
        mark: int,
    ) -> None:
        self._windows = windows
        self._loss = loss
        self._size = plugin.data_size
        self._asked = asked
        self._compares_samples = mark != 0
        # Each rank should read the whole of such a stream, and keep a part of it.
        loader = windows.loader
        self._reads_all = isinstance(loader, StreamLoader) and loader.mark != 0
        self._sums: Sums | None = None
        length = len(window.batches)
        totals = _Totals(
            samples=local.samples,
            tokens=local.tokens,
            ended=int(window.last),
            lengths=length,
            squared_lengths=length**2,
            marks=mark,
            squared_marks=mark**2,
        )
        items = local.items
        if not plugin.reports_metrics:  # another rank counts these samples
            items = 0.0
            totals = _Totals()
        # Every rank may ask.
        totals = totals._replace(stops=int(asked.stop > 0), saves=int(asked.save))
        self._summing = plugin.start_sum_over_ranks([items, *totals])

    def wait(self) -> Sums:
        """Return the sums; a ValueError says that ranks do not read the data as they should."""
        if self._sums is None:
            items, *totals = self._summing()
            self._sums = self._checked(items, _Totals(*(int(value) for value in totals)))
        return self._sums

    def _checked(self, items: float, totals: _Totals) -> Sums:
        if math.isnan(items):
            self._loss.raise_refusal()
        if self._compares_samples:
            self._require_own_samples(totals)
        # A last window can have fewer batches here than on another rank.
        some_ended = 0 < totals.ended < self._size and not self._windows.uneven
        if some_ended or not _are_equal(totals.lengths, totals.squared_lengths, self._size):
            raise ValueError(ENDED.format(self._size))
        stop = _signal_of_any_rank(self._asked.stop) if totals.stops else self._asked.stop
        asked = Asked(stop, save=totals.saves > 0)
        count = Count(items, totals.samples, totals.tokens)
        return Sums(count, asked, ends_epoch=totals.ended == self._size)

    def _require_own_samples(self, totals: _Totals) -> None:
        """Refuse data of which all ranks train the same part."""
        same = _are_equal(totals.marks, totals.squared_marks, self._size)
        if self._reads_all and not same:
            raise ValueError(OTHER_SAMPLES)
        if same and not self._reads_all:
            raise ValueError(SAME_SAMPLES.format(self._size))


def _are_equal(total: int, total_of_squares: int, ranks: int) -> bool:
    """Return whether all ranks have added the same number, by the inequality of Cauchy-Schwarz."""
    return total_of_squares * ranks == total**2


def _sum(counts: Sequence[Count | None]) -> Count:
    items = 0.0
    samples = 0
    tokens = 0
    for counted in counts:
        if counted is not None:
            items += counted.items
            samples += counted.samples
            tokens += counted.tokens
    return Count(items, samples, tokens)


def _mark_of(window: Window, loader: Any) -> int:
    """Return a checksum of the samples of a window; 0 if nothing is to compare."""
    if isinstance(loader, StreamLoader) and loader.mark:
        return loader.mark
    return 0 if _is_partitioned(loader) else checksum(window.batches[0])


def _signal_of_any_rank(number: int) -> int:
    """Return which signal asked some rank to stop; a collective."""
    signal = torch.tensor(number)
    dist.all_reduce(signal, dist.ReduceOp.MAX)
    return int(signal)


def _is_partitioned(loader: Any) -> bool:
    if isinstance(loader, StreamLoader):
        return loader.dataset.divided_by != "itself"
    parts = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return any(isinstance(part, PartitionedBatches | DistributedSampler) for part in parts)
