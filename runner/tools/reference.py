"""The reference: one process with the whole model and the samples of all data-parallel ranks.

It is given its model, criterion, optimizer and mode, and knows nothing of the plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from runner.booster import Booster, OptimizerWrapper
from runner.booster.batch import mapped
from runner.booster.loss import Criterion, WindowLoss
from runner.clip import ClipMode
from runner.config.schema import RunConfig
from runner.data import PartitionedBatches
from runner.tools.comparison import SideMetrics


def windows(
    config: RunConfig,
    parts: int,
    data: Dataset[Any],
    collate: Callable[[Any], Any],
    chunks: int = 1,
) -> Iterator[list[Any]]:
    """Yield the batches of each optimizer step: the chunks of all parts of its microbatches."""
    dataset: Any = data
    order = PartitionedBatches(
        len(dataset),
        config.data.batch_size,
        rank=0,
        world_size=parts,
        shuffle=True,
        drop_last=config.data.drop_last,
        seed=config.seed,
    )
    steps = config.accumulation.steps
    for epoch in count():
        order.set_epoch(epoch)
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(epoch)
        for first in range(0, len(order), steps):
            found = []
            for number in range(first, min(first + steps, len(order))):
                for part in order.parts(number):
                    size = max(-(-len(part) // chunks), 1)  # as a pipeline splits a microbatch
                    found += [part[start : start + size] for start in range(0, len(part), size)]
            # The default generator of a loader draws its seed from the global one.
            plain = torch.Generator()
            yield list(
                DataLoader(dataset, batch_sampler=found, collate_fn=collate, generator=plain)
            )


class Reference:
    """Training in one process, one optimizer step at a time."""

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion | None,
        optimizer: torch.optim.Optimizer,
        mode: ClipMode,
        batches: Iterator[list[Any]],
    ) -> None:
        self.model, self.mode, self._criterion, self._batches = model, mode, criterion, batches
        self.loss = WindowLoss(model.train(), criterion)
        self.optimizer: OptimizerWrapper
        _, self.optimizer, *_ = Booster(nonfinite="error").boost(model, optimizer, criterion)
        self.optimizer.bind(mode)

    def step(self) -> tuple[SideMetrics, float, dict[str, Tensor]]:
        """Take one step; return its metrics, its loss and the clipped gradients by name."""
        loss = self.accumulate()
        metrics = SideMetrics.of(self.optimizer.clip(self.mode))
        gradients = {
            shard.name: shard.param.grad.detach().cpu().clone()
            for shard in self.optimizer.layout.shards
            if shard.param.grad is not None
        }
        self.optimizer.step()
        self.optimizer.zero_grad()
        return metrics, loss, gradients

    @torch.enable_grad()
    def accumulate(self) -> float:
        """Run forward and backward on every batch of the next step, and return the step's loss."""
        host = next(self._batches)
        counts = [self.loss.items(batch).items for batch in host]
        weight = 1.0 / self.loss.divisor(sum(counts))
        device = next(self.model.parameters()).device
        total = 0.0
        try:
            for on_host, items in zip(host, counts, strict=True):
                batch = mapped(on_host, lambda t: t.to(device))
                loss = self.loss.sum(self.loss.forward(self.model, batch), batch, items)
                self.optimizer.backward(loss, weight)
                total += float(loss.detach()) * weight
        except Exception as error:
            error.add_note("raised in the one process that the plugin is compared with")
            raise
        return total

    def peak(self) -> float:
        """Return the largest value that the mode compares with its threshold in the first step."""
        self.accumulate()
        peak = float(self.optimizer.clip(self.mode).max_stat)
        if peak == 0:
            raise ValueError(
                "no threshold can be derived from the first step, whose gradient is zero: "
                "give clip and clip.threshold"
            )
        return peak

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu() for name, p in self.model.named_parameters()}
