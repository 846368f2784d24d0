"""Passes of a boosted model over windows and held-out data, and their items over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data.distributed import DistributedSampler

from runner.booster import Booster, ModelWrapper, OptimizerWrapper, Plugin
from runner.booster.batch import batch_size, mapped, targets_of
from runner.booster.loss import Count, WindowLoss
from runner.booster.measurement import settle
from runner.data.order import PartitionedBatches
from runner.data.stream import StreamLoader, checksum
from runner.gradients import transfer
from runner.gradients.norms import powers_of
from runner.run_folder import keys
from runner.train.metrics import EvalMetrics
from runner.train.stop import beat
from runner.train.windows import Window, Windows, has_no_sample, held_out

SAME_SAMPLES = (
    "all {} data-parallel ranks read the same first batch: use plugin.prepare_dataloader, a "
    "DistributedSampler, or a stream of this rank's samples alone"
)
OTHER_SAMPLES = (
    "the stream yields other samples on each rank, so that those which a rank does not keep are "
    "lost: set shards_itself = True in its class if it divides itself over ranks"
)
ONE_SAMPLE = (
    "batch norm needs two samples or more, and a microbatch of this rank has one: leave out the "
    "last, short microbatch of an epoch by data.drop_last=true (drop_last=True of the loader), or "
    "choose another data.batch_size"
)
NO_NOISE_SCALE = "needs two or more microbatches of plugin=single or ddp, and clip.norm_type=2"
NO_UPDATE_RATIO = "copies the weights before a step: use clip.step_in_backward=false"
_NUMBERS = 16  # elements of a tensor that says what a loss divides by
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


def count(
    window: Window, windows: Windows, loss: WindowLoss, plugin: Plugin, first: bool, asked: Asked
) -> tuple[list[float | None], Callable[[], Sums]]:
    """Count a window on the host, and start to sum the counts over all data-parallel ranks.

    Returns the items of each microbatch of this rank, None for one that it has no sample of, and
    what waits for the sums. What ranks ask travels with them, so that it costs no collective.
    """
    counts: list[Count | None] = []
    for number, batch in enumerate(window.batches, window.first):
        counts.append(None if has_no_sample(windows.loader, number) else loss.counted(batch))
    items = [None if counted is None else counted.items for counted in counts]
    local = _sum(counts)
    if plugin.world_size == 1:
        return items, lambda: Sums(local, asked, window.last)
    size = plugin.data_size
    length = len(window.batches)
    reads_all = isinstance(windows.loader, StreamLoader) and windows.loader.mark != 0
    mark = _mark_of(window, windows.loader) if first and size > 1 else 0
    values = [*local, window.last, length, length**2, mark, mark**2]
    if not plugin.reports_metrics:
        values = [0.0] * len(values)  # Another rank counts these samples.
    # Every rank may ask.
    summing = plugin.start_sum_over_ranks([*values, asked.stop > 0, asked.save])

    def wait() -> Sums:
        total_items, *totals = summing()
        if math.isnan(total_items):
            loss.raise_refusal()
        samples, tokens, ended, lengths, squares, marks, squared_marks, stops, saves = map(
            int, totals
        )
        if mark:
            _require_own_samples(squared_marks * size == marks**2, reads_all, size)
        # A last window can have fewer batches here than on another rank.
        some_ended = 0 < ended < size and not windows.uneven
        if some_ended or squares * size != lengths**2:
            raise ValueError(ENDED.format(size))
        stop = _signal_of_any_rank(asked.stop) if stops else asked.stop
        total = Count(total_items, samples, tokens)
        return Sums(total, Asked(stop, saves > 0), ended == size)

    return items, cache(wait)


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


def _require_own_samples(same: bool, reads_all: bool, ranks: int) -> None:
    """Refuse data of which all ranks train the same part.

    ``same``: all ranks have read the same first samples. ``reads_all``: they should, as each reads
    the whole stream and keeps a part.
    """
    if reads_all and not same:
        raise ValueError(OTHER_SAMPLES)
    if same and not reads_all:
        raise ValueError(SAME_SAMPLES.format(ranks))


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


class _SummedScores(NamedTuple):
    """Scores over all ranks."""

    loss: float
    items: float
    right: float  # targets that were predicted
    graded: float  # targets that are classes
    ungraded: float  # ranks whose targets are no classes
    ranks: float  # ranks that have a sample


class _Scores:
    """What an evaluation adds up on this rank."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self._items = 0.0
        self._has_samples = False
        self._right: list[Tensor] = []
        self._graded: list[Tensor] = []
        self._ungraded = False

    def note_items(self, items: float | None) -> None:
        """Add the items of a batch, None for a batch without weight."""
        if items is not None:
            self._items += items
            self._has_samples = True

    def note_correct(self, correct: tuple[Tensor, Tensor] | None, idle: bool) -> None:
        """Add how many targets were predicted, and of how many; None if they are no classes."""
        if correct is None:
            self._ungraded = True
        elif not idle:
            self._right.append(correct[0])
            self._graded.append(correct[1])

    def over_ranks(self, plugin: Plugin) -> _SummedScores:
        """Return the scores over all data-parallel ranks; a collective."""
        values = [
            _total(self.losses),
            self._items,
            _total(self._right),
            _total(self._graded),
            self._ungraded,
            self._has_samples,
        ]
        return _SummedScores(*plugin.sum_over_data(values))


def _total(values: Sequence[Tensor]) -> float:
    """Add 0-dimensional tensors; the host waits once for those of an accelerator."""
    if not values:
        return 0.0
    wide = transfer.widest(values[0].device)
    return torch.stack([value.to(wide) for value in values]).sum().item()


@dataclass
class Passes:
    booster: Booster
    model: ModelWrapper
    optimizer: OptimizerWrapper
    loss: WindowLoss
    device: torch.device
    region: Callable[[str], AbstractContextManager[Any]] = lambda part: nullcontext()

    def __post_init__(self) -> None:
        # Without autocast the wrapper would only cost a call.
        self._module = self.model if self.model.dtype else self.model.module
        self.loss.alone = self.booster.plugin.world_size == 1
        self.loss.on_accelerator = self.device.type != "cpu"

    def accumulate(
        self,
        batches: Sequence[Any],
        counts: Sequence[float | None],
        items: Callable[[], float],
        after_each: Callable[[int, int], None],
    ) -> Tensor:
        """Run forward and backward passes of a window; return this rank's share of its loss."""

        def weight() -> float:
            # Ranks average their gradients; the loss is divided by the items of all of them.
            return self.booster.plugin.data_size / self.loss.divisor(items())

        self.loss.begin_window()
        total: Tensor | None = None
        for number, (batch, count) in enumerate(zip(batches, counts, strict=True), 1):
            beat()
            last = number == len(batches)
            # Ranks synchronise their gradients on the last microbatch only.
            with nullcontext() if last else self.booster.no_sync(self.model, self.optimizer):
                try:
                    loss = self._train(batch, count, weight)
                except (ValueError, RuntimeError) as error:
                    if _too_few_for_batch_norm(error):
                        error.add_note(ONE_SAMPLE)
                    raise
            if not last:  # after that one comes the step
                after_each(number, len(batches))
            total = loss if total is None else total + loss
        assert total is not None
        return total.to(transfer.widest(total.device)) * weight()

    def settle(self, batches: Sequence[Any]) -> None:
        """Find what the mean of the loss divides by, once; a collective."""
        settle(
            self.loss,
            self.model.module,
            batches,
            self.model.pipeline,
            together=self.booster.plugin.world_size > 1,
            to_device=self.to_device,
        )

    def _settled(self, held: Iterator[tuple[bool, Any]]) -> Iterator[tuple[bool, Any]]:
        """Measure the loss on batches that may tell more of it; a collective."""
        for idle, batch in held:
            if not self.loss.is_settled:
                self.settle([batch])
            yield idle, batch

    def _train(self, host: Any, count: float | None, weight: Callable[[], float]) -> Tensor:
        batch = self.to_device(host)
        if self.model.pipeline is None:
            with self.region("forward"):
                outputs = self.loss.forward(self._module, batch)
                loss = self.loss.sum(outputs, batch, count)
            with self.region("backward"):
                self.optimizer.backward(loss, weight())
            return loss.detach()
        with self.region("forward"):  # A schedule mixes forward and backward passes.
            return self.booster.train_pipeline(
                self.model, self.optimizer, self.loss, (host, batch), weight(), count is not None
            )

    @torch.no_grad()
    def evaluate(self, loader: Any, metrics: EvalMetrics) -> dict[str, float]:
        """Compute the mean loss over the items of ``loader``, and the metrics; a collective."""
        plugin = self.booster.plugin
        self.model.eval()
        self.loss.begin_window()
        scores = _Scores()
        for idle, host in self._settled(held_out(loader, plugin)):
            beat()
            items = None if idle else self.loss.counted(host).items
            scores.note_items(items)
            batch = self.to_device(host)
            with self._with_graph_of_loss(batch, items):
                outputs = self._outputs(batch)
            if outputs is None:
                continue  # The last stage, on another rank, has the outputs and the loss.
            scores.losses.append(self.loss.sum(outputs, batch, items).detach())
            metrics.update(outputs, batch, idle)
            scores.note_correct(self.loss.compares.correct(outputs, batch), idle)
        summed = scores.over_ranks(plugin)
        self.model.train()
        if math.isnan(summed.loss):
            self.loss.raise_refusal()
        self.loss.confirm()
        if not summed.items:
            return {}
        values = {keys.EVAL_LOSS: summed.loss / (summed.items + self.loss.epsilon)}
        if summed.graded and not summed.ungraded:
            values[keys.EVAL_ACCURACY] = summed.right / summed.graded
        return values | metrics.compute(plugin, int(summed.ranks))

    def _outputs(self, batch: Any) -> Any:
        """Return the outputs of a held-out batch; None on a rank that does not have them."""
        if self.model.pipeline is None:
            return self.loss.forward(self._module, batch)
        return self.model.pipeline.evaluate(self.loss.call(batch).only_tensor())

    @contextmanager
    def _with_graph_of_loss(self, batch: Any, items: float | None) -> Iterator[None]:
        """Record the graph of a held-out loss where it tells what the loss divides by.

        That of a loss which the model returns goes through the model: it keeps no tensor that is
        larger than the targets, which may have a weight each.
        """
        if items == 0:
            with torch.enable_grad():
                yield
        elif items is not None and self.loss.compares_returned:
            targets = targets_of(batch)
            most = batch_size(batch) if targets is None else targets.numel()
            pack = partial(_without_elements, most=max(most, _NUMBERS))
            with torch.enable_grad(), saved_tensors_hooks(pack, _unchanged):
                yield
        else:
            yield

    @torch.no_grad()
    def square_of_gradients(self) -> Tensor:
        """Return ‖G‖² of what backward passes have added up on this rank, unscaled."""
        layout = self.optimizer.layout
        shards = [shard for shard in layout.shards if shard.param.grad is not None]
        gradients = [cast(Tensor, shard.param.grad) for shard in shards]
        scale = 1.0 if self.optimizer.loss_scale is None else self.optimizer.loss_scale.scale
        return powers_of(layout, shards, gradients, 2.0)[0] / scale**2

    def to_device(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        move = getattr(batch, "to", None)
        if not isinstance(batch, Tensor) and callable(move):
            return move(self.device)
        return mapped(batch, lambda t: t.to(self.device, non_blocking=True))


def _without_elements(tensor: Tensor, most: int) -> Tensor:
    """Return a tensor that a graph keeps; a large one becomes zeros of its shape, one in memory."""
    if tensor.numel() <= most:
        return tensor
    return tensor.new_zeros(()).expand(tensor.shape)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _too_few_for_batch_norm(error: BaseException | None) -> bool:
    """Return whether torch's batch norm has refused a single sample, also inside of a pipeline."""
    while error is not None:
        if "Expected more than 1 value per channel" in str(error):
            return True
        error = error.__cause__
    return False
