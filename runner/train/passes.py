"""Forward and backward passes of a boosted model over windows, and over held-out data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from runner.booster import Booster, ModelWrapper, OptimizerWrapper, Plugin
from runner.booster.batch import batch_size, mapped, targets_of
from runner.booster.loss import WindowLoss
from runner.booster.measurement import settle
from runner.gradients import transfer
from runner.gradients.norms import powers_of
from runner.run_folder import keys
from runner.telemetry.step import Numbers, noise_estimates
from runner.train.counts import Counts
from runner.train.metrics import EvalMetrics
from runner.train.stop import beat
from runner.train.windows import held_out

log = logging.getLogger(__name__)

_NUMBERS = 16  # elements of a tensor that says what a loss divides by
ONE_SAMPLE = (
    "batch norm needs two samples or more, and a microbatch of this rank has one: leave out the "
    "last, short microbatch of an epoch by data.drop_last=true (drop_last=True of the loader), or "
    "choose another data.batch_size"
)


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
    """Add 0-dimensional tensors; the host waits once for an accelerator."""
    if not values:
        return 0.0
    wide = transfer.widest(values[0].device)
    return torch.stack([value.to(wide) for value in values]).sum().item()


class Accumulated(NamedTuple):
    """What the passes of a window leave besides gradients."""

    loss: Tensor
    """The loss of the window on this rank, summed over its items, a 0-dimensional tensor."""
    weight: float
    """What this sum is multiplied by to be this rank's part of the mean."""
    first_square: Tensor | None
    """‖G‖² of the first of several microbatches, if it was measured."""

    def noise(self, counts: Counts, data_size: int, norm: Tensor) -> Numbers:
        """Return what the noise scale is made of, if the first microbatch was measured."""
        if self.first_square is None:
            return {}
        total = counts.over_ranks().total
        share = (counts.items[0] or 0.0) / (total.items or 1.0)
        if not 0 < share < 1:
            return {}
        # Its gradient was weighted as a part of the mean over all ranks.
        unweighted = self.first_square / (share * data_size) ** 2
        return noise_estimates(unweighted, share, total.samples, norm)


@dataclass
class Passes:
    """Runs the passes of a training on this rank; ``region`` marks their parts in a profile."""

    booster: Booster
    model: ModelWrapper
    optimizer: OptimizerWrapper
    loss: WindowLoss
    device: torch.device
    compares_batches: bool
    """Whether losses of several batches are added up, so that it matters what a mean divides by."""
    region: Callable[[str], AbstractContextManager[Any]] = lambda part: nullcontext()

    def __post_init__(self) -> None:
        if self.model.pipeline is not None and self.loss.takes_batch:
            raise ValueError("a model that computes its own loss cannot be cut into stages")
        self.compares_batches |= self.booster.plugin.data_size > 1
        self.compares_batches |= self.model.pipeline is not None
        # Without autocast the wrapper would only cost a call.
        self._module = self.model if self.model.dtype else self.model.module
        self.loss.alone = self.booster.plugin.world_size == 1
        self.loss.on_accelerator = self.device.type != "cpu"

    def accumulate(
        self,
        batches: Sequence[Any],
        counts: Counts,
        measures_first: bool,
        after_each: Callable[[int, int], None],
    ) -> Accumulated:
        """Run the forward and backward passes of a window.

        Args:
            batches: its microbatches on this rank.
            counts: their items, and what waits for the items of all ranks.
            measures_first: whether to measure the gradient of the first microbatch.
            after_each: called with the number of a microbatch and how many there are, after each
                but the last, which the optimizer step follows.
        """

        def weight() -> float:
            # Ranks average their gradients; the loss is divided by the items of all of them.
            items = counts.over_ranks().total.items
            return self.booster.plugin.data_size / self.loss.divisor(items)

        self.loss.begin_window(lambda: counts.over_ranks().total)
        total: Tensor | None = None
        first_square: Tensor | None = None
        for number, (batch, count) in enumerate(zip(batches, counts.items, strict=True), 1):
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
            if measures_first and number == 1 and not last:
                first_square = self._square_of_gradients()
            if not last:
                after_each(number, len(batches))
            total = loss if total is None else total + loss
        assert total is not None
        return Accumulated(total, weight(), first_square)

    def settle(self, batches: Sequence[Any]) -> None:
        """Find what the mean of the loss divides by, once and where it matters; a collective."""
        if not self.compares_batches:
            return
        settle(
            self.loss,
            self.model.module,
            batches,
            self.model.pipeline,
            together=self.booster.plugin.world_size > 1,
            to_device=self.to_device,
        )

    def _settled(self, batches: Iterator[tuple[bool, Any]]) -> Iterator[tuple[bool, Any]]:
        """Measure the loss on batches that may tell more of it; a collective."""
        for idle, batch in batches:
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

        The graph of a loss that the model returns goes through the model: it keeps no tensor that
        is larger than the targets, which may have a weight each.
        """
        if items == 0:
            with torch.enable_grad():
                yield
        elif items is not None and self.loss.compares_returned:
            targets = targets_of(batch)
            elements = batch_size(batch) if targets is None else targets.numel()
            pack = partial(_without_elements, most=max(elements, _NUMBERS))
            with torch.enable_grad(), saved_tensors_hooks(pack, _unchanged):
                yield
        else:
            yield

    @torch.no_grad()
    def _square_of_gradients(self) -> Tensor:
        """Return ‖G‖² of what backward passes have added up on this rank, unscaled."""
        layout = self.optimizer.layout
        shards = [shard for shard in layout.shards if shard.param.grad is not None]
        gradients = [cast(Tensor, shard.param.grad) for shard in shards]
        scale = 1.0 if self.optimizer.loss_scale is None else self.optimizer.loss_scale.scale
        return powers_of(layout, shards, gradients, 2.0)[0] / scale**2

    def to_device(self, batch: Any) -> Any:
        """Return a batch on the device of the training, by its own ``to`` if it has one."""
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


def warn_of_batch_norm(model: nn.Module, accumulation_steps: int) -> None:
    """Warn that batch norm does not see the whole batch of a step that accumulates."""
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
    if accumulation_steps > 1 and has_batch_norm:
        text = "batch norm sees one microbatch at a time: %d accumulated microbatches are not "
        log.warning(text + "the same as one batch of their size", accumulation_steps)


def _too_few_for_batch_norm(error: BaseException | None) -> bool:
    """Return whether torch's batch norm has refused a single sample, also inside of a pipeline."""
    while error is not None:
        if "Expected more than 1 value per channel" in str(error):
            return True
        error = error.__cause__
    return False
