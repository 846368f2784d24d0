"""Count the items, samples and tokens of a window over all data-parallel ranks."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data.distributed import DistributedSampler

from runner.booster import Plugin
from runner.booster.loss import Count, WindowLoss
from runner.booster.plugin.base import SHARD_BY_HAND
from runner.data.order import PartitionedBatches
from runner.train.asked import Asked
from runner.train.windows import Window, Windows


class WindowCount(NamedTuple):
    """What one window holds.

    Attributes:
        items: number of items of each microbatch on this rank; None where this rank has no sample.
        total: items, samples and tokens of the whole window, over all ranks.
        asked: what some rank asks of all of them.
    """

    items: list[float | None]
    total: Count
    asked: Asked


def count(
    window: Window,
    windows: Windows,
    loss: WindowLoss,
    plugin: Plugin,
    first: bool,
    asked: Asked,
) -> WindowCount:
    """Count a window on the host, before its microbatches move to the device.

    The loss of the first microbatch is divided by the items of the whole window. There is one
    collective of host memory where there are several ranks.

    Args:
        window: microbatches of this rank.
        windows: where ``window`` was read.
        loss: knows what an item is.
        plugin: how many ranks read, and which one this is.
        first: whether this is the first window of a run, in which all ranks have to read different
            samples.
        asked: what this rank asks of all of them.

    Raises:
        ValueError: all ranks read the same samples, or the data of some ranks has ended.
    """
    items: list[float | None] = []
    total, samples, tokens = 0.0, 0, 0
    for number, batch in enumerate(window.batches, window.first):
        if windows.weightless(number):
            items.append(None)
            continue
        here, read, seen = loss.items(batch)
        items.append(here)
        total, samples, tokens = total + here, samples + read, tokens + seen
    if plugin.world_size == 1:
        return WindowCount(items, Count(total, samples, tokens), asked)
    size, length = plugin.data_size, len(window.batches)
    if size == 1:
        asked = asked.of_all(plugin.sum_over_ranks(asked.counts()))
        return WindowCount(items, Count(total, samples, tokens), asked)
    mark = _mark(window.batches[0]) if first and not _is_partitioned(windows.loader) else 0
    mine = [total, samples, tokens, window.last, length, length**2, mark, mark**2]
    if not plugin.reports_metrics:
        mine = [0] * len(mine)
    # Every rank may ask, also one whose samples another rank counts.
    all_items, *others = plugin.sum_over_ranks([*mine, *asked.counts()])
    all_samples, all_tokens, ended, *sums = map(int, others)
    lengths, squared_lengths, marks, squared_marks, *all_asked = sums
    if mark and squared_marks * size == marks**2:  # All marks are the same.
        raise ValueError(
            f"all {size} data-parallel ranks read the same first batch, so every sample counts "
            "that many times: make the loader by plugin.prepare_dataloader, or give it a "
            f"DistributedSampler. For an IterableDataset: {SHARD_BY_HAND}"
        )
    # A last window can have fewer batches here than on another rank.
    if 0 < ended < size or squared_lengths * size != lengths**2:
        raise ValueError(
            f"the data of some of the {size} data-parallel ranks has ended before that of the "
            "others: make the loader by plugin.prepare_dataloader, or let an "
            "IterableDataset yield the same number of batches on each rank"
        )
    total_count = Count(all_items, all_samples, all_tokens)
    return WindowCount(items, total_count, asked.of_all(all_asked))


def _is_partitioned(loader: Any) -> bool:
    """Return whether a loader is known to divide its data over ranks."""
    return isinstance(getattr(loader, "batch_sampler", None), PartitionedBatches) or isinstance(
        getattr(loader, "sampler", None), DistributedSampler
    )


def _mark(batch: Any) -> int:
    """Return a checksum of a batch, at least 1.

    Checksums have 20 bits, so that sums of their squares are exact.
    """
    digest = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().cpu().contiguous().flatten()
            digest = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), digest)
        else:
            digest = zlib.crc32(repr(leaf).encode(), digest)
    return digest % 2**20 + 1
