"""Count the items, samples and tokens of a window over all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from runner.booster import Plugin
from runner.booster.loss import Count, WindowLoss
from runner.data.order import PartitionedBatches
from runner.data.stream import StreamLoader, checksum
from runner.train.asked import Asked
from runner.train.windows import Window, Windows

SHARD_BY_HAND = (
    "let its __iter__ yield this rank's samples alone, itertools.islice(samples, plugin.data_rank, "
    "None, plugin.data_size), equally many on each rank (with num_workers, each worker yields its "
    "part of them), and hand it to torch.utils.data.DataLoader; or leave that to "
    "plugin.prepare_dataloader"
)
"""How to shard a data set without an index over data-parallel ranks."""

SAME_STREAM = (
    "the stream yields other samples on each rank, and every rank keeps its part of them, so that "
    "samples are lost: if it divides itself over ranks, set shards_itself = True in its class; "
    "else let it yield the same samples everywhere (draw random numbers from the generators of "
    "Python, NumPy or torch that are seeded for it)"
)


class WindowCount:
    """What one window holds, here and on all ranks."""

    def __init__(
        self,
        items: list[float | None],
        last: bool,
        wait: Callable[[], tuple[Count, Asked, bool]],
    ) -> None:
        self.items = items
        self.last = last
        self._wait = wait
        self._sums: tuple[Count, Asked] | None = None

    def sums(self) -> tuple[Count, Asked]:
        """Return the items, samples and tokens of the window, and what some rank asks of all."""
        if self._sums is None:
            counts, asked, self.last = self._wait()
            self._sums = counts, asked
        return self._sums

    def total_items(self) -> float:
        """Return the number of items of the window over all ranks, see :meth:`sums`."""
        return self.sums()[0].items


def count(
    window: Window,
    windows: Windows,
    loss: WindowLoss,
    plugin: Plugin,
    first: bool,
    asked: Asked,
) -> WindowCount:
    """Count a window on the host, before its microbatches move to the device."""
    items: list[float | None] = []
    total, samples, tokens = 0.0, 0, 0
    for number, batch in enumerate(window.batches, window.first):
        if windows.weightless(number):
            items.append(None)
            continue
        here, read, seen = loss.items(batch)
        items.append(here)
        total, samples, tokens = total + here, samples + read, tokens + seen
    own, size, length = Count(total, samples, tokens), plugin.data_size, len(window.batches)
    if plugin.world_size == 1:
        return WindowCount(items, window.last, lambda: (own, asked, window.last))
    if size == 1:
        asking = plugin.start_sum_over_ranks(asked.counts())

        def answer() -> tuple[Count, Asked, bool]:
            return own, asked.of_all(asking()), window.last

        return WindowCount(items, window.last, answer)
    alike = isinstance(windows.loader, StreamLoader) and windows.loader.mark
    mark = 0
    if first:
        mark = alike or (0 if _is_partitioned(windows.loader) else checksum(window.batches[0]))
    mine = [*own, window.last, length, length**2, mark, mark**2]
    if not plugin.reports_metrics:
        mine = [0] * len(mine)
    # Every rank may ask, also one whose samples another rank counts.
    summing = plugin.start_sum_over_ranks([*mine, *asked.counts()])

    def wait() -> tuple[Count, Asked, bool]:
        all_items, *others = summing()
        all_samples, all_tokens, ended, *checks = map(int, others)
        lengths, squared_lengths, marks, squared_marks, *all_asked = checks
        same = squared_marks * size == marks**2
        if mark and alike and not same:
            raise ValueError(SAME_STREAM)
        if mark and not alike and same:
            raise ValueError(
                f"all {size} data-parallel ranks read the same first batch, so every sample counts "
                "that many times: make the loader by plugin.prepare_dataloader, or give it a "
                f"DistributedSampler. For an IterableDataset: {SHARD_BY_HAND}"
            )
        # A last window can have fewer batches here than on another rank.
        some = 0 < ended < size and not windows.uneven
        if some or squared_lengths * size != lengths**2:
            raise ValueError(
                f"the data of some of the {size} data-parallel ranks has ended before that of the "
                "others: make the loader by plugin.prepare_dataloader, or let an "
                "IterableDataset yield the same number of batches on each rank"
            )
        return Count(all_items, all_samples, all_tokens), asked.of_all(all_asked), ended == size

    return WindowCount(items, window.last, wait)


def _is_partitioned(loader: Any) -> bool:
    """Return whether a loader is known to divide its data over ranks."""
    if isinstance(loader, StreamLoader):
        return loader.dataset.divided_by != "itself"
    return isinstance(getattr(loader, "batch_sampler", None), PartitionedBatches) or isinstance(
        getattr(loader, "sampler", None), DistributedSampler
    )
