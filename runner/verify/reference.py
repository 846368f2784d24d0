"""The reference: one process with the whole model and the samples of all data-parallel ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from runner.booster import Booster, NonFiniteGradient, OptimizerWrapper
from runner.booster.batch import mapped
from runner.booster.joint import CRITERION
from runner.booster.loss import WindowLoss
from runner.clip import ClipMode
from runner.config.schema import RunConfig
from runner.data import PartitionedBatches
from runner.train import build
from runner.verify.comparison import SideMetrics
from runner.verify.setting import collate, dtype_of, make_criterion, make_model, make_optimizer


class Windows:
    """The batches of each optimizer step: every chunk of every part of its microbatches."""

    def __init__(
        self,
        config: RunConfig,
        parts: int,
        chunks: int = 1,
        data: Dataset[Any] | None = None,
    ) -> None:
        self.config = config
        self._dataset: Any = build.make_data(config.data).train if data is None else data
        self.parts = parts
        self.chunks = chunks
        self.uneven = False
        self.drew = False

    def __iter__(self) -> Iterator[list[Any]]:
        config = self.config
        dataset = self._dataset
        order = PartitionedBatches(
            len(dataset),
            config.data.batch_size,
            rank=0,
            world_size=self.parts,
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
                window = range(first, min(first + steps, len(order)))
                parts = [part for number in window for part in order.parts(number)]
                yield self._read([one for part in parts for one in self._chunks(part)])

    def _chunks(self, part: list[int]) -> list[list[int]]:
        size = -(-len(part) // self.chunks)
        self.uneven |= len(part) != size * self.chunks
        return [part[start : start + size] for start in range(0, len(part), max(size, 1))]

    def _read(self, chunks: list[list[int]]) -> list[Any]:
        loader = DataLoader(
            self._dataset,
            batch_sampler=chunks,
            collate_fn=partial(collate, dtype=dtype_of(self.config)),
            generator=torch.Generator(),  # the default draws a seed from the global generator
        )
        before = _random_state()
        batches = list(loader)
        self.drew |= _random_state() != before
        return batches


class Reference:
    """Training in one process, one optimizer step at a time."""

    def __init__(self, windows: Windows, mode: ClipMode) -> None:
        config = windows.config
        self.device = build.device_of(config.device)
        self.windows = windows
        self._batches = iter(windows)
        self.model, self.dropped = make_model(config)
        self.model.train()
        criterion = make_criterion(config)
        self._criterion = criterion
        self.loss = WindowLoss(self.model, criterion)
        self.optimizer: OptimizerWrapper
        booster = Booster(nonfinite="error")
        optimizer = make_optimizer(config, self.model, criterion, mode)
        _, self.optimizer, *_ = booster.boost(self.model, optimizer, criterion)
        self.mode = mode
        self.optimizer.bind(mode)
        self.drew = False

    def step(self) -> tuple[SideMetrics, float, dict[str, Tensor]]:
        """Take one step."""
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

    def accumulate(self) -> float:
        """Run forward and backward on every batch of the next step, and return the step's loss."""
        try:
            return self._accumulate()
        except Exception as error:
            error.add_note("raised in the one process that the plugin is compared with")
            for cause in self.causes():
                error.add_note(f"possible cause: {cause}")
            raise

    def causes(self) -> Iterator[str]:
        """Yield reasons why a correct plugin may differ from one process."""
        if self.drew:
            yield (
                "the model draws random numbers in its forward pass (functional dropout, for "
                "example): ranks draw other numbers than one process"
            )
        if self.windows.drew:
            yield "the data draws random numbers when it is read: the two sides read other samples"
        layers = [
            module
            for module in self.model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in layers):
            yield "SyncBatchNorm couples the samples of all ranks; one process reads them in parts"
        if layers and self.windows.uneven:
            yield (
                "the pipeline fills a short microbatch up with copies, which enter batch norm: "
                "choose a data.batch_size that plugin.num_microbatches divides, and "
                "data.drop_last=true"
            )

    @torch.enable_grad()
    def _accumulate(self) -> float:
        host = next(self._batches)
        counts = [self.loss.items(batch).items for batch in host]
        weight = 1.0 / self.loss.divisor(sum(counts))
        before = _random_state()
        total = 0.0
        for on_host, items in zip(host, counts, strict=True):
            batch = mapped(on_host, lambda t: t.to(self.device))
            loss = self.loss.sum(self.loss.forward(self.model, batch), batch, items)
            self.optimizer.backward(loss, weight)
            total += float(loss.detach()) * weight
        self.drew |= _random_state() != before
        return total

    def peak(self) -> float:
        """Return the largest value that the mode compares with its threshold in the first step."""
        self.accumulate()
        layout = self.optimizer.layout
        with torch.no_grad():
            peak = float(self.mode.clip(layout).max_stat)
        if not math.isfinite(peak):
            raise NonFiniteGradient(f"the gradient of step 1 is not finite: it holds {peak}")
        if peak == 0:
            raise ValueError(
                "no threshold can be derived from the first step, whose gradient is zero: "
                "give clip and clip.threshold"
            )
        return peak

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters by name, on the host."""
        parameters = dict(self.model.named_parameters())
        if isinstance(self._criterion, nn.Module):
            own = self._criterion.named_parameters()
            parameters |= {CRITERION + name: parameter for name, parameter in own}
        return {name: parameter.detach().cpu() for name, parameter in parameters.items()}


def _random_state() -> list[bytes]:
    """Return the states of the generators of PyTorch, NumPy and Python."""
    states = [torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode()]
    states.append(np.random.get_state(legacy=True)[1].tobytes())  # type: ignore[index]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return states
