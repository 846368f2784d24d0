"""Forward and backward passes of a boosted model over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from runner.booster import Booster, ModelWrapper, OptimizerWrapper
from runner.booster.batch import mapped
from runner.booster.loss import WindowLoss
from runner.clip import Number, transfer
from runner.run_folder import keys
from runner.train.beat import beat
from runner.train.eval_metrics import EvalMetrics
from runner.train.windows import held_out


@dataclass
class Passes:
    """Runs microbatches through a model that is whole, sharded, or cut into pipeline stages."""

    booster: Booster
    model: ModelWrapper
    optimizer: OptimizerWrapper
    loss: WindowLoss
    device: torch.device
    metrics: EvalMetrics

    def __post_init__(self) -> None:
        # Without autocast the wrapper would only cost a call.
        self._module = self.model if self.model.dtype else self.model.module
        self._data_size = self.booster.plugin.data_size
        self.losses: list[Tensor] = []

    def accumulate(
        self,
        batches: Sequence[Any],
        counts: Sequence[float | None],
        items: Callable[[], float],
        after_each: Callable[[int, int], None],
    ) -> Number:
        """Run forward and backward passes of a window; ranks synchronise on the last one only."""
        # Data-parallel ranks average their gradients; the loss is divided by all items already.
        self.losses = []

        def weight() -> float:
            return self._data_size / self.loss.divisor(items())

        total: Tensor | None = None
        for number, (batch, count) in enumerate(zip(batches, counts, strict=True), 1):
            beat()
            if number == len(batches):
                loss = self._train(batch, count, weight)
            else:
                with self.booster.no_sync(self.model, self.optimizer):
                    loss = self._train(batch, count, weight)
                after_each(number, len(batches))
            self.losses.append(loss)
            total = loss if total is None else total + loss
        assert total is not None
        return (total.item() if transfer.can_read(self.device) else total) * weight()

    @torch.no_grad()
    def evaluate(self, loader: Any) -> dict[str, float]:
        """Compute the mean loss over the items of held-out data, and accuracy of classes."""
        self.model.eval()
        losses: list[Number] = []
        right: list[Number] = []
        items, graded, ungraded = 0.0, 0.0, False
        for idle, host in held_out(loader, self.booster.plugin):
            beat()
            batch = self._to_device(host)
            count = None if idle else self.loss.items(host).items
            items += count or 0.0
            graded += 0 if idle else self.loss.graded(host)
            if self.model.pipeline is not None:
                outputs = self.model.pipeline.evaluate(self.loss.call(batch).only_tensor())
            else:
                outputs = self.loss.forward(self._module, batch)
            if outputs is None:
                continue  # The last stage, on another rank, has the outputs and the loss.
            losses.append(transfer.read(self.loss.sum(outputs, batch, count)))
            if not idle:
                self.metrics.update(outputs, batch)
            correct = self.loss.correct(outputs, batch)
            ungraded = ungraded or correct is None
            if correct is not None and not idle:
                right.append(correct)
        here = [transfer.add(losses), items, transfer.add(right), graded, ungraded]
        total, items, correct, graded, unknown = self.booster.plugin.sum_over_data(here)
        further = self.metrics.compute(self.booster.plugin)
        self.model.train()
        if not items:
            return {}
        metrics = {keys.EVAL_LOSS: total / items}
        if graded and not unknown:
            metrics[keys.EVAL_ACCURACY] = correct / graded
        return metrics | further

    def _train(self, host: Any, count: float | None, weight: Callable[[], float]) -> Tensor:
        """Run forward and backward; return the summed loss, 0 where another rank has it."""
        batch = self._to_device(host)
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

    def _to_device(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        if not isinstance(batch, Tensor) and callable(move := getattr(batch, "to", None)):
            return move(self.device)
        return mapped(batch, lambda t: t.to(self.device, non_blocking=True))
