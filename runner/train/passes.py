"""Forward and backward passes of a boosted model over the microbatches of a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from runner.booster import Booster, ModelWrapper, OptimizerWrapper, Plugin
from runner.booster.batch import mapped
from runner.booster.loss import Count, WindowLoss
from runner.clip import Number, transfer
from runner.data.order import PartitionedBatches
from runner.data.stream import StreamLoader, checksum
from runner.train.beat import beat
from runner.train.windows import Window, Windows

SHARD_BY_HAND = (
    "let its __iter__ yield this rank's samples alone, itertools.islice(samples, plugin.data_rank, "
    "None, plugin.data_size), equally many on each rank (with num_workers, each worker yields its "
    "part of them), and hand it to torch.utils.data.DataLoader; or leave that to "
    "plugin.prepare_dataloader"
)
SAME_STREAM = (
    "the stream yields other samples on each rank, and every rank keeps its part of them, so that "
    "samples are lost: if it divides itself over ranks, set shards_itself = True in its class; "
    "else let it yield the same samples everywhere (draw random numbers from the generators of "
    "Python, NumPy or torch that are seeded for it)"
)


class Asked(NamedTuple):
    """What a rank asks of all ranks after the optimizer step that begins."""

    stop: int = 0  # number of a signal, or 0
    save: bool = False

    def of_all(self, ranks_that_stop: float, ranks_that_save: float) -> Asked:
        """Return what some rank asks for, the same on every rank."""
        stop = 0
        if ranks_that_stop:
            number = torch.tensor(self.stop)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            stop = int(number)
        return Asked(stop, ranks_that_save > 0)


class WindowCount:
    """What one window holds, here and on all ranks.

    Attributes:
        items: items of each microbatch of this rank; None for one that it has no sample of.
        last: whether the window is the last one of the epoch; known after :meth:`sums`.
    """

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
        """Return the counts over all ranks, and what some rank asks of all; waits once."""
        if self._sums is None:
            counts, asked, self.last = self._wait()
            self._sums = counts, asked
        return self._sums

    def total_items(self) -> float:
        """Return the number of items of the window over all ranks."""
        return self.sums()[0].items


def count(
    window: Window, windows: Windows, loss: WindowLoss, plugin: Plugin, first: bool, asked: Asked
) -> WindowCount:
    """Count a window on the host, and start to sum the counts over all data-parallel ranks.

    What ranks ask of each other travels with the counts, so that it costs no collective of its own.
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
    own, size, length = Count(total, samples, tokens), plugin.data_size, len(window.batches)
    flags = [float(asked.stop > 0), float(asked.save)]
    if plugin.world_size == 1:
        return WindowCount(items, window.last, lambda: (own, asked, window.last))
    if size == 1:
        asking = plugin.start_sum_over_ranks(flags)
        return WindowCount(items, window.last, lambda: (own, asked.of_all(*asking()), window.last))
    alike = isinstance(windows.loader, StreamLoader) and windows.loader.mark
    mark = 0
    if first:
        mark = alike or (0 if _is_partitioned(windows.loader) else checksum(window.batches[0]))
    mine = [*own, window.last, length, length**2, mark, mark**2]
    # Every rank may ask, also one whose samples another rank counts.
    summing = plugin.start_sum_over_ranks(
        [*(mine if plugin.reports_metrics else [0.0] * len(mine)), *flags]
    )

    def wait() -> tuple[Count, Asked, bool]:
        all_items, *others = summing()
        all_samples, all_tokens, ended, *checks, stop, save = map(int, others)
        lengths, squared_lengths, marks, squared_marks = checks
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
        totals = Count(all_items, all_samples, all_tokens)
        return totals, asked.of_all(stop, save), ended == size

    return WindowCount(items, window.last, wait)


def _is_partitioned(loader: Any) -> bool:
    """Return whether a loader is known to divide its data over ranks."""
    if isinstance(loader, StreamLoader):
        return loader.dataset.divided_by != "itself"
    return isinstance(getattr(loader, "batch_sampler", None), PartitionedBatches) or isinstance(
        getattr(loader, "sampler", None), DistributedSampler
    )


@dataclass
class Passes:
    """Runs microbatches through a model that is whole, sharded, or cut into pipeline stages."""

    booster: Booster
    model: ModelWrapper
    optimizer: OptimizerWrapper
    loss: WindowLoss
    device: torch.device
    microbatch: int = 0  # number of the current one in its window, from 1

    def __post_init__(self) -> None:
        # Without autocast the wrapper would only cost a call.
        self._module = self.model if self.model.dtype else self.model.module

    def accumulate(
        self,
        batches: Sequence[Any],
        counts: Sequence[float | None],
        items: Callable[[], float],
        after_each: Callable[[int, int], None],
    ) -> Number:
        """Run forward and backward passes of a window; return this rank's share of its loss.

        ``after_each`` is called after all microbatches but the last, after which comes the step.
        """

        def weight() -> float:
            # Ranks average their gradients; the loss is divided by the items of all of them.
            return self.booster.plugin.data_size / self.loss.divisor(items())

        total: Tensor | None = None
        for number, (batch, own) in enumerate(zip(batches, counts, strict=True), 1):
            beat()
            self.microbatch, last = number, number == len(batches)
            # Ranks synchronise their gradients on the last microbatch only.
            with nullcontext() if last else self.booster.no_sync(self.model, self.optimizer):
                loss = self._train(batch, own, weight)
            if not last:
                after_each(number, len(batches))
            total = loss if total is None else total + loss
        assert total is not None
        return (total.item() if transfer.can_read(self.device) else total) * weight()

    def _train(self, host: Any, count: float | None, weight: Callable[[], float]) -> Tensor:
        """Run forward and backward; return the summed loss, 0 where another rank has it."""
        batch = self.to_device(host)
        if self.model.pipeline is None:
            outputs = self.loss.forward(self._module, batch)
            loss = self.loss.sum(outputs, batch, count)
            self.optimizer.backward(loss, weight())
            return loss.detach()
        self.booster.before_pipeline(self.model, self.loss, batch)
        factor = self.optimizer.begin_backward(weight())

        def summed(outputs: Tensor, at: slice) -> Tensor:
            part = mapped(batch, itemgetter(at))
            items = None
            if count is not None:
                items = self.loss.items(mapped(host, itemgetter(at))).items
            return self.loss.sum(outputs, part, items) * factor

        inputs = self.loss.call(batch).only_tensor()
        total = self.model.pipeline.train(inputs, summed) / factor
        self.optimizer.add_loss(total, weight())
        self.optimizer.end_backward()
        return total

    def predict(self, batch: Any) -> Any:
        """Return the outputs of a batch on the device; None where another stage has them."""
        if self.model.pipeline is not None:
            return self.model.pipeline.evaluate(self.loss.call(batch).only_tensor())
        return self.loss.forward(self._module, batch)

    def to_device(self, batch: Any) -> Any:
        """Move a batch to the device."""
        if self.device.type == "cpu":
            return batch
        if not isinstance(batch, Tensor) and callable(move := getattr(batch, "to", None)):
            return move(self.device)
        return mapped(batch, lambda t: t.to(self.device, non_blocking=True))
