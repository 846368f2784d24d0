"""Passes of a boosted model over the microbatches of a window, their items and gradient norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
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
from runner.train.state import Window, Windows, has_no_sample
from runner.train.stop import beat

SAME_SAMPLES = (
    "all {} data-parallel ranks read the same first batch, so every sample counts that many times: "
    "make the loader by plugin.prepare_dataloader, or give it a DistributedSampler; let an "
    "IterableDataset yield this rank's samples alone, equally many on each rank"
)
OTHER_SAMPLES = (
    "the stream yields other samples on each rank, and every rank keeps its part of them, so that "
    "samples are lost: if it divides itself over ranks, set shards_itself = True in its class; "
    "else let it yield the same samples everywhere"
)
ENDED = (
    "the data of some of the {} data-parallel ranks has ended before that of the others: make the "
    "loader by plugin.prepare_dataloader, or let an IterableDataset yield the same number of "
    "batches on each rank"
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


Sums = tuple[Count, Asked, bool]
"""Counts of a window over all ranks, what some rank asks for, whether it is the epoch's last."""


def count(
    window: Window, windows: Windows, loss: WindowLoss, plugin: Plugin, first: bool, asked: Asked
) -> tuple[list[float | None], Callable[[], Sums]]:
    """Count a window on the host, and start to sum the counts over all data-parallel ranks.

    Returns the items of each microbatch of this rank, None for one that it has no sample of, and
    what waits for the sums. What ranks ask of each other travels with the counts, so that it costs
    no collective of its own.
    """
    numbered, loader = enumerate(window.batches, window.first), windows.loader
    held = [None if has_no_sample(loader, at) else loss.items(batch) for at, batch in numbered]
    items = [None if one is None else one.items for one in held]
    here = [one for one in held if one is not None]
    own = Count(*(sum(values) for values in zip((0.0, 0, 0), *here, strict=True)))
    size, length, last = plugin.data_size, len(window.batches), window.last
    flags = [float(asked.stop > 0), float(asked.save)]
    if plugin.world_size == 1:
        return items, lambda: (own, asked, last)
    if size == 1:
        asking = plugin.start_sum_over_ranks(flags)
        return items, cache(lambda: (own, asked.of_all(*asking()), last))
    alike = isinstance(windows.loader, StreamLoader) and windows.loader.mark
    mark = 0
    if first:
        mark = alike or (0 if _is_partitioned(windows.loader) else checksum(window.batches[0]))
    mine = [*own, last, length, length**2, mark, mark**2]
    # Every rank may ask, also one whose samples another rank counts.
    counted = mine if plugin.reports_metrics else [0.0] * len(mine)
    summing = plugin.start_sum_over_ranks([*counted, *flags])

    def wait() -> Sums:
        all_items, *others = summing()
        all_samples, all_tokens, ended, lengths, squares, marks, squared_marks, *flagged = map(
            int, others
        )
        same = squared_marks * size == marks**2
        if mark and alike and not same:
            raise ValueError(OTHER_SAMPLES)
        if mark and not alike and same:
            raise ValueError(SAME_SAMPLES.format(size))
        # A last window can have fewer batches here than on another rank.
        some = 0 < ended < size and not windows.uneven
        if some or squares * size != lengths**2:
            raise ValueError(ENDED.format(size))
        totals = Count(all_items, all_samples, all_tokens)
        return totals, asked.of_all(*flagged), ended == size

    return items, cache(wait)


def _is_partitioned(loader: Any) -> bool:
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
            last = number == len(batches)
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
        return self.booster.train_pipeline(
            self.model, self.optimizer, self.loss, (host, batch), weight(), count is not None
        )

    def predict(self, batch: Any) -> Any:
        """Return the outputs of a batch on the device; None where another stage has them."""
        if self.model.pipeline is not None:
            return self.model.pipeline.evaluate(self.loss.call(batch).only_tensor())
        return self.loss.forward(self._module, batch)

    def to_device(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        if not isinstance(batch, Tensor) and callable(move := getattr(batch, "to", None)):
            return move(self.device)
        return mapped(batch, lambda t: t.to(self.device, non_blocking=True))
