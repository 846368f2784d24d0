"""What both sides of a verification are made of, and the reference: a training in one process.

The reference has the whole model and the samples of all ranks, and knows nothing of the plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from runner.booster import Booster, OptimizerWrapper
from runner.booster.batch import mapped
from runner.booster.criterion import Criterion
from runner.booster.loss import Count, Loss, WindowLoss
from runner.booster.measurement import settle
from runner.check.reference import total_norm
from runner.clip import ClipMode, build
from runner.clip.mode import NEVER
from runner.config.modes import MODES
from runner.config.schema import RunConfig
from runner.data.dataset import length_of
from runner.data.order import PartitionedBatches
from runner.data.samples import SeededSamples
from runner.parallel.collectives import on_first
from runner.train.build import device_of, make_collate, make_criterion, make_data, make_model
from runner.train.progress import Progress
from runner.verify.comparison import relative, side_of


def collate_for(config: RunConfig) -> Callable[[Any], Any]:
    """Return what collates samples to a batch with floating-point tensors of ``verify.dtype``."""
    dtype = getattr(torch, config.verify.dtype)

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    collate = make_collate(config.data)
    return lambda samples: mapped(collate(samples), convert)


def make_samples(config: RunConfig, parts: int) -> Dataset[Any]:
    """Return the training data of both sides, the first samples of a stream; a collective."""
    data: Any = make_data(config.data).train
    if length_of(data) is None:
        stream = data
        microbatches = config.verify.steps * config.accumulation.phases.most * parts
        samples = microbatches * config.data.batch_size
        data = on_first(lambda: list(islice(stream, samples)))  # the stream may have no end
    return data  # type: ignore[no-any-return]


def make_mode(config: RunConfig, name: str) -> tuple[ClipMode, bool]:
    """Make a clipping mode; also return True if its threshold is still to be derived."""
    chosen = config.clip
    if name == chosen.mode:
        return build(chosen.options), False
    described = MODES[name]
    info = described.info
    # A mode that needs the optimizer has nothing to compare with in the first step.
    has_threshold = info.needs_optimizer or "threshold" in described.at_once
    derived = info.takes_threshold and not has_threshold
    threshold = NEVER if derived else info.published[0][0] if info.needs_optimizer else None
    options = {"threshold": threshold, "norm_type": chosen.norm_type}
    return build(name, **{**options, **described.at_once}), derived


def make_parts(
    config: RunConfig, mode: ClipMode
) -> tuple[nn.Module, Criterion | None, torch.optim.Optimizer]:
    """Make a model without dropout and with the same weights on every rank, criterion, optimizer.

    That is plain SGD, because the steps of Adam and similar optimizers hide a wrong scale.
    """
    torch.manual_seed(config.seed)
    device = device_of(config.device)
    dtype = getattr(torch, config.verify.dtype)
    model = make_model(config.model).to(device, dtype)
    switch_off_dropout(model)
    parameters = dict.fromkeys(model.parameters())
    criterion = make_criterion(config.loss)
    if isinstance(criterion, nn.Module):
        criterion.to(device, dtype)
    if mode.info.needs_optimizer:
        return model, criterion, torch.optim.AdamW(parameters, lr=config.verify.lr / 10, eps=1e-3)
    return model, criterion, torch.optim.SGD(parameters, lr=config.verify.lr)


def switch_off_dropout(model: nn.Module) -> None:
    """Set all dropout probabilities to 0, because ranks draw other elements than one process."""
    for module in model.modules():
        kind = type(module).__name__.lower()
        drops = "drop" in kind or "stochasticdepth" in kind
        for name, value in list(vars(module).items()):
            is_chance = isinstance(value, int | float) and not isinstance(value, bool)
            named = "drop" in name.lower() or (drops and name in ("p", "prob"))
            if is_chance and named and 0 < value <= 1:
                setattr(module, name, 0.0)


class Reference:
    """Training in one process, step by step, on the samples of ``parts`` ranks in ``chunks``."""

    def __init__(
        self, config: RunConfig, mode: ClipMode, parts: int, data: Dataset[Any], chunks: int = 1
    ) -> None:
        self.model, criterion, optimizer = make_parts(config, mode)
        self.mode = mode
        self._bound = config.verify.bound
        self.loss = WindowLoss(self.model.train(), Loss(criterion, config.loss.items))
        self.optimizer: OptimizerWrapper
        _, self.optimizer, *_ = Booster(nonfinite="error").boost(self.model, optimizer, criterion)
        self.optimizer.bind(mode)
        self._batches = self._windows(config, parts, data, chunks)

    @staticmethod
    def _windows(config: RunConfig, parts: int, data: Any, chunks: int) -> Iterator[list[Any]]:
        """Yield the batches of each optimizer step: the chunks of all parts of its microbatches."""
        phases = config.accumulation.phases
        tokens = make_data(config.data).tokens_per_sample or 0
        progress = Progress()
        order = PartitionedBatches(
            len(data),
            config.data.batch_size,
            0,
            parts,
            shuffle=True,
            drop_last=config.data.drop_last,
            seed=config.seed,
        )
        collate = collate_for(config)
        samples = SeededSamples(data, config.seed)
        for epoch in count():
            order.set_epoch(epoch)
            samples.set_epoch(epoch)
            while progress.epoch == epoch:
                first = progress.batch
                end = min(first + phases.at(progress.of), len(order))
                batches = []
                for number in range(first, end):
                    for part in order.parts(number):
                        size = max(-(-len(part) // chunks), 1)  # as a pipeline splits a microbatch
                        batches += [part[i : i + size] for i in range(0, len(part), size)]
                loader = DataLoader(
                    samples,
                    batch_sampler=batches,
                    collate_fn=collate,
                    # The default generator of a loader draws its seed from the global one.
                    generator=torch.Generator(),
                )
                read = sum(len(indices) for indices in batches)
                is_last = end == len(order)
                progress = progress.after(end - first, read, read * tokens, is_last)
                yield list(loader)

    def step(self) -> tuple[dict[str, float], float, dict[str, Tensor]]:
        """Take one step; return its metrics, its loss and the clipped gradients by name."""
        loss = self.accumulate()
        shards = self.optimizer.layout.shards
        measured = [shard.param.grad for shard in shards if shard.param.grad is not None]
        norm = total_norm(measured, self.mode.norm_type)
        metrics = side_of(self.optimizer.clip(self.mode))
        if not relative(metrics["norm"], norm) <= self._bound:
            metrics["norm"] = norm  # by code that clips nothing: the plugin's norm will differ
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
        device = next(self.model.parameters()).device

        def to_device(batch: Any) -> Any:
            return mapped(batch, lambda tensor: tensor.to(device))

        settle(self.loss, self.model, host, to_device=to_device)
        counted = [self.loss.items(batch) for batch in host]
        counts = [count.items for count in counted]
        samples = sum(count.samples for count in counted)
        total_count = Count(sum(counts), samples, 0)
        self.loss.begin_window(lambda: total_count)
        weight = 1.0 / self.loss.divisor(total_count.items)
        total = 0.0
        for on_host, items in zip(host, counts, strict=True):
            batch = mapped(on_host, lambda t: t.to(device))
            loss = self.loss.sum(self.loss.forward(self.model, batch), batch, items)
            self.optimizer.backward(loss, weight)
            total += float(loss.detach()) * weight
        return total

    def peak(self) -> float:
        """Return the largest value that the mode compares with its threshold in the first step."""
        self.accumulate()
        peak = float(self.optimizer.clip(self.mode).max_stat)
        if peak == 0:
            raise ValueError("the gradient of the first step is zero: give clip.threshold")
        return peak
