"""The training loop, and the Trainer that holds its parts."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data.distributed import DistributedSampler

from runner.booster import Booster, LossScale, ModelWrapper, OptimizerWrapper, Plugin, SinglePlugin
from runner.booster.loss import Count, Criterion, WindowLoss
from runner.booster.optimizer import Nonfinite
from runner.booster.plugin.base import SHARD_BY_HAND
from runner.clip import ClipMode, GradientClipping, Number, build, transfer
from runner.clip.layout import local
from runner.clip.norms import norms
from runner.config.duration import Duration
from runner.data.order import PartitionedBatches
from runner.run_folder import keys
from runner.telemetry.meter import Meter, StepMetrics
from runner.telemetry.sinks.sink import Sink
from runner.train.progress import Every, Progress, Window, windows

log = logging.getLogger(__name__)


class Trainer:
    """Trains a model: microbatches, clip, step, schedule, and a record of what clipping did.

    Args:
        model: the network. With a method ``loss(outputs, batch)`` it is called with whole batches;
            otherwise with a batch's inputs, and ``criterion`` compares outputs and targets.
        train_dataloader: yields pairs (inputs, targets), one microbatch each; anything that holds a
            tensor [samples, ...] where the model has a ``loss``.
        max_duration: ``3ep``, ``500ba`` (optimizer steps), ``100000sp``, ``1000000tok``.
        algorithms: :class:`runner.GradientClipping`, or clipping modes; one at most.
        eval_dataloader: held-out pairs, or None.
        optimizers: the optimizer, or several that step together, each over its own parameters; SGD
            with a rate of 0.1 by default. ``train/lr`` is the rate of the first one.
        schedulers: one or several; stepped once after each optimizer step that was taken.
        criterion: loss of (outputs, targets); mean cross entropy by default. The mean is taken over
            the items of all microbatches and ranks (class weights count), see
            :class:`runner.booster.loss.WindowLoss`. ``reduction="sum"`` is not divided. The
            trainable parameters of a module are synchronised and clipped with those of the model.
        plugin: how the model is spread over ranks.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        accumulation_steps: microbatches to one optimizer step.
        eval_interval: a duration between evaluations; there is always one at the end.
        nonfinite: what to do with a step whose gradient is not finite: skip, error or ignore.
        loss_scale: of fp16.
        sinks: where rows go. Give them on the first rank only.
        log_interval: steps between rows.
        log_flush: steps between transfers of figures to the host.
        what_if: thresholds for which ``clip/what_if/<λ>`` is logged: the share of the steps so far
            that each would have clipped, in the units of the clipping mode.
        per_layer: also log each parameter's gradient norm.
        probe: print so many elements of the first parameter after each microbatch.
        say: prints for ``probe``.
        device: the model, the criterion and each batch are moved there; by default the model's own.

    Raises:
        ValueError: more than one clipping algorithm, or a malformed duration.
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataloader: Iterable[Any],
        max_duration: str | Duration = "1ep",
        algorithms: Sequence[GradientClipping | ClipMode] | GradientClipping | ClipMode = (),
        eval_dataloader: Iterable[Any] | None = None,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        schedulers: Any = None,
        criterion: Criterion | None = None,
        *,
        plugin: Plugin | None = None,
        precision: str = "fp32",
        accumulation_steps: int = 1,
        eval_interval: str | Duration = "1ep",
        nonfinite: Nonfinite = "skip",
        loss_scale: LossScale | None = None,
        sinks: Sequence[Sink] = (),
        log_interval: int = 1,
        log_flush: int = 50,
        what_if: Sequence[float] = (),
        per_layer: bool = False,
        probe: int = 0,
        say: Callable[[str], None] = print,
        device: torch.device | str | None = None,
    ) -> None:
        if device is not None:
            model.to(device)
            if isinstance(criterion, nn.Module):
                criterion.to(device)
        self.device = next(model.parameters()).device
        self.mode = _clipping(algorithms)
        self.plugin = SinglePlugin() if plugin is None else plugin
        self.train_dataloader = train_dataloader
        self.eval_dataloader = eval_dataloader
        self.max_duration = _duration(max_duration)
        self.accumulation_steps = accumulation_steps
        several = isinstance(schedulers, Sequence)
        self.schedulers = list(schedulers) if several else [schedulers] if schedulers else []
        self._schedules_behind = False
        self.window_loss = WindowLoss(model, criterion, checked=True)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.booster = Booster(precision, self.plugin, loss_scale, nonfinite)
        trained = list(model.parameters())
        if isinstance(criterion, nn.Module):
            trained += [each for each in criterion.parameters() if each.requires_grad]
        optimizer = optimizers or torch.optim.SGD(dict.fromkeys(trained), lr=0.1)
        self.model: ModelWrapper
        self.optimizer: OptimizerWrapper
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer, criterion)
        self.mode.bind(self.optimizer.layout)
        if self.model.pipeline is not None and self.window_loss.takes_batch:
            raise ValueError("a model that computes its own loss cannot be cut into stages")
        # Without autocast the wrapper would only cost a call.
        self._forward = self.model if self.model.dtype else self.model.module
        divided = (
            accumulation_steps > 1 or self.plugin.data_size > 1 or self.model.pipeline is not None
        )
        # Whether this loader may not divide its data over the ranks.
        self._foreign = not (
            isinstance(getattr(train_dataloader, "batch_sampler", None), PartitionedBatches)
            or isinstance(getattr(train_dataloader, "sampler", None), DistributedSampler)
        )
        self.window_loss.checked &= (
            divided and self.plugin.reports_metrics and self.plugin.data_rank == 0
        )
        self.progress = Progress()
        self.evaluates = Every(_duration(eval_interval))
        self.per_layer = per_layer
        self.probe = probe
        self.say = say
        self.meter = Meter(sinks, log_interval, log_flush, what_if=what_if)
        if self.plugin.data_size > 1 or self.model.pipeline is not None:
            self.meter.mean_over_data = self._mean_over_data
        if accumulation_steps > 1 and any(
            isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
        ):
            log.warning(
                "batch norm sees one microbatch at a time: %d accumulated microbatches are not "
                "the same as one batch of their size",
                accumulation_steps,
            )

    def fit(self) -> dict[str, Any]:
        """Train until ``max_duration``.

        Returns:
            The summary of the run: final and best figures, percentiles of ‖G‖, the clip ratio.

        Raises:
            NonFiniteGradient: a gradient is not finite and ``nonfinite`` is ``error``.
        """
        try:
            self.model.train()
            started = time.perf_counter()
            for window in self._windows():
                counts, (items, samples, tokens) = self._count(window)
                loss = self._accumulate(window.batches, counts, items)
                extra = self._layer_norms() if self.per_layer else {}
                self._follow_schedules()
                outcome = self.optimizer.clip(self.mode)
                lr = self.optimizer.param_groups[0]["lr"]
                self.optimizer.step()
                self._schedules_behind = True
                self.optimizer.zero_grad()
                self._show(len(counts), len(counts))

                at = self.progress
                at.advance(samples, tokens, end_of_epoch=window.last)
                seconds = time.perf_counter() - started
                due = self.evaluates.due(at) or at.reached(self.max_duration)
                self.meter.push(
                    StepMetrics(at.step, loss, outcome, lr, at.samples, at.tokens, seconds, extra),
                    self.evaluate() if due else None,
                )
                started = time.perf_counter()
            self._follow_schedules()
        except BaseException:
            # What led up to the end is the most wanted part of the record; but what ended the run
            # is not to be replaced by a disk that is full as well.
            with suppress(Exception):
                self.meter.flush(together=False)
            raise
        return self.meter.summary()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss over the items of the held-out data, and accuracy where there are classes.

        Of a criterion with ``reduction="sum"``, too, this is the mean.
        """
        if self.eval_dataloader is None:
            return {}
        self.model.eval()
        total, items, correct, graded, ungraded = 0.0, 0.0, 0.0, 0.0, False
        order = getattr(self.eval_dataloader, "batch_sampler", None)
        for number, host in enumerate(self.eval_dataloader):
            batch = self._to_device(host)
            # A part without weight goes through the model all the same: other ranks may wait in it.
            idle = isinstance(order, PartitionedBatches) and order.weightless(number)
            count = None if idle else self.window_loss.items(host).items
            items += count or 0.0
            graded += 0 if idle else self.window_loss.graded(host)
            outputs = self._outputs(batch)
            if outputs is None:
                continue  # They come out on another rank, which has the loss.
            total += float(self.window_loss.sum(outputs, batch, count))
            right = self.window_loss.correct(outputs, batch)
            ungraded = ungraded or right is None
            correct += 0 if idle else right or 0
        figures_here = [total, items, correct, graded, ungraded]
        total, all_items, correct, graded, unknown = self.plugin.sum_over_data(figures_here)
        self.model.train()
        if not all_items:
            return {}
        figures = {keys.EVAL_LOSS: total / all_items}
        if graded and not unknown:
            figures[keys.EVAL_ACCURACY] = correct / graded
        return figures

    def _follow_schedules(self) -> None:
        """Step the schedulers if the last optimizer step was taken.

        An accelerator that skips a step tells the host late, so this is called once the next
        backward pass is queued: the accelerator is never idle while the host waits.
        """
        if self.schedulers and self._schedules_behind and self.optimizer.was_taken():
            for scheduler in self.schedulers:
                scheduler.step()
        self._schedules_behind = False

    def _windows(self) -> Iterator[Window]:
        """Windows of microbatches, epoch after epoch, until the duration is reached.

        Raises:
            ValueError: an epoch holds nothing that the duration counts, so it would never end.
        """
        order = getattr(self.train_dataloader, "batch_sampler", None)
        sampler = getattr(self.train_dataloader, "sampler", None)
        dataset = getattr(self.train_dataloader, "dataset", None)
        while not self.progress.reached(self.max_duration):
            for part in (order, sampler, dataset):
                set_epoch = getattr(part, "set_epoch", None)
                if callable(set_epoch):
                    set_epoch(self.progress.epoch)
            empty = True
            for window in windows(self.train_dataloader, self.accumulation_steps):
                empty = False
                yield window
                if self.progress.reached(self.max_duration):
                    return
            if empty:
                raise ValueError("the training data holds no microbatch")
            if self.progress.of(self.max_duration.unit) == 0:
                raise ValueError(f"this data has no tokens, so {self.max_duration} never ends")

    def _count(self, window: Window) -> tuple[list[float | None], Count]:
        """Count what each microbatch here holds, and what the window holds on all ranks.

        Counted on the host, before anything moves to the device: the loss of the first microbatch
        already needs the items of all of them.

        Returns:
            Items of each microbatch, None for one that does not count; and the sums over the window
            and all ranks.
        """
        counts: list[float | None] = []
        total, samples, tokens = 0.0, 0, 0
        order = getattr(self.train_dataloader, "batch_sampler", None)
        for number, batch in enumerate(window.batches, window.first):
            if isinstance(order, PartitionedBatches) and order.weightless(number):
                counts.append(None)
                continue
            here, read, seen = self.window_loss.items(batch)
            counts.append(here)
            total, samples, tokens = total + here, samples + read, tokens + seen
        if self.plugin.data_size == 1:
            return counts, Count(total, samples, tokens)
        mark = self._mark(window)
        size, length = self.plugin.data_size, len(window.batches)
        mine = [total, samples, tokens, window.last, length, length**2, mark, mark**2]
        all_items, *others = self.plugin.sum_over_data(mine)
        all_samples, all_tokens, ended, *sums = map(int, others)
        lengths, squared_lengths, marks, squared_marks = sums
        if mark and squared_marks * size == marks**2:  # All marks are the same.
            raise ValueError(
                f"all {size} data-parallel ranks read the same first batch, so every sample counts "
                "that many times: make the loader by plugin.prepare_dataloader, or give it a "
                f"DistributedSampler. Of an IterableDataset: {SHARD_BY_HAND}"
            )
        # A last window can have fewer batches here than on another rank.
        if 0 < ended < size or squared_lengths * size != lengths**2:
            raise ValueError(
                f"the data of some of the {size} data-parallel ranks has ended before that of the "
                "others: make the loader by plugin.prepare_dataloader, or let an "
                "IterableDataset yield the same number of batches on each rank"
            )
        return counts, Count(all_items, all_samples, all_tokens)

    def _mark(self, window: Window) -> int:
        """Return what tells the first batch of a run from that of another rank; 0 if not needed.

        A loader that does not divide its data over ranks reads the same everywhere. Marks have 20
        bits, so that sums of their squares are exact.
        """
        if self.progress.step or not self._foreign:
            return 0
        digest = 0
        for leaf in tree_leaves(window.batches[0]):
            if isinstance(leaf, Tensor):
                flat = leaf.detach().cpu().contiguous().flatten()
                digest = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), digest)
            else:
                digest = zlib.crc32(repr(leaf).encode(), digest)
        return digest % 2**20 + 1

    def _accumulate(self, batches: list[Any], counts: list[float | None], items: float) -> Number:
        """Forward and backward of every microbatch; ranks synchronise on the last one alone.

        Returns:
            This rank's sum of item losses x data ranks ÷ items: its mean over ranks is the loss.
        """
        # Data-parallel ranks average their gradients; the loss is divided by all items already.
        weight = self.plugin.data_size / self.window_loss.divisor(items)
        total: Tensor | None = None
        for number, (host, count) in enumerate(zip(batches, counts, strict=True), 1):
            final = number == len(batches)
            held = nullcontext() if final else self.booster.no_sync(self.model, self.optimizer)
            with held:
                loss = self._pass(host, count, weight)
            total = loss if total is None else total + loss
            if not final:
                self._show(number, len(batches))
        assert total is not None
        return total.item() * weight if transfer.can_read(self.device) else total * weight

    def _pass(self, host: Any, count: float | None, weight: float) -> Tensor:
        """Forward and backward of a microbatch; its summed loss, 0 where that is another rank's."""
        batch = self._to_device(host)
        if self.model.pipeline is None:
            outputs = self.window_loss.forward(self._forward, batch)
            loss = self.window_loss.sum(outputs, batch, count)
            self.optimizer.backward(loss, weight)
            return loss.detach()
        factor = self.optimizer.begin_backward(weight)

        def summed(outputs: Tensor, at: slice) -> Tensor:
            part = [half[at] for half in batch]
            items = None
            if count is not None:
                items = self.window_loss.items([half[at] for half in host]).items
            return self.window_loss.sum(outputs, part, items) * factor

        total = self.model.pipeline.train(batch[0], summed) / factor
        self.optimizer.end_backward()
        return total

    def _outputs(self, batch: Any) -> Any:
        """Outputs of a batch without a backward pass; None where they are another rank's."""
        if self.model.pipeline is not None:
            return self.model.pipeline.evaluate(batch[0])
        return self.window_loss.forward(self._forward, batch)

    def _layer_norms(self) -> dict[str, float]:
        self.optimizer.unscale()
        each = norms(self.optimizer.layout, self.mode.norm_type)
        return {keys.layer_norm(name): norm for name, norm in each.items()}

    def _show(self, number: int, of: int) -> None:
        if not self.probe or self.plugin.rank:
            return
        first = local(next(self.model.unwrap().parameters()).detach()).flatten()[: self.probe]
        figures = " ".join(f"{x:+.6f}" for x in first.tolist())
        self.say(f"step {self.progress.step + 1} microbatch {number}/{of}: {figures}")

    def _to_device(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        if not isinstance(batch, Tensor) and callable(move := getattr(batch, "to", None)):
            return move(self.device)
        return tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), batch)

    def _mean_over_data(self, figures: list[float]) -> list[float]:
        size = self.plugin.data_size
        return [figure / size for figure in self.plugin.sum_over_data(figures)]


def _duration(given: str | Duration) -> Duration:
    return given if isinstance(given, Duration) else Duration.parse(given)


def _clipping(
    algorithms: Sequence[GradientClipping | ClipMode] | GradientClipping | ClipMode,
) -> ClipMode:
    listed = [algorithms] if isinstance(algorithms, GradientClipping | ClipMode) else algorithms
    if len(listed) > 1:
        raise ValueError(f"one clipping algorithm at most, not {len(listed)}")
    for algorithm in listed:
        return algorithm.mode() if isinstance(algorithm, GradientClipping) else algorithm
    return build("none")
