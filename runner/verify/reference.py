"""The reference: one process with the whole model and the samples of all data-parallel ranks.

What both sides make in the same way is here too: model, criterion, mode, optimizer and batches.
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
from runner.booster.joint import CRITERION
from runner.booster.loss import Criterion, WindowLoss
from runner.clip import ClipMode
from runner.clip import build as build_mode
from runner.clip.mode import NEVER
from runner.config.modes import built_in
from runner.config.schema import RunConfig
from runner.data import PartitionedBatches
from runner.data.dataset import collate_pairs, length_of
from runner.parallel.collectives import on_first
from runner.train import build
from runner.verify.comparison import SideMetrics


def windows(
    config: RunConfig, parts: int, chunks: int = 1, data: Dataset[Any] | None = None
) -> Iterator[list[Any]]:
    """Yield the batches of each optimizer step: the chunks of all parts of its microbatches."""
    dataset: Any = build.make_data(config.data).train if data is None else data
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
            window = range(first, min(first + steps, len(order)))
            found = []
            for part in (part for number in window for part in order.parts(number)):
                size = max(-(-len(part) // chunks), 1)  # as a pipeline splits a microbatch
                found += [part[start : start + size] for start in range(0, len(part), size)]
            loader = DataLoader(
                dataset,
                batch_sampler=found,
                collate_fn=collate_for(config),
                generator=torch.Generator(),  # the default draws a seed from the global generator
            )
            yield list(loader)


class Reference:
    """Training in one process, one optimizer step at a time."""

    def __init__(self, config: RunConfig, batches: Iterator[list[Any]], mode: ClipMode) -> None:
        self.device = build.device_of(config.device)
        self.mode, self._batches = mode, batches
        self.model = make_model(config).train()
        self._criterion = make_criterion(config)
        self.loss = WindowLoss(self.model, self._criterion)
        optimizer = make_optimizer(config, self.model, self._criterion, mode)
        self.optimizer: OptimizerWrapper
        booster = Booster(nonfinite="error")
        _, self.optimizer, *_ = booster.boost(self.model, optimizer, self._criterion)
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
        total = 0.0
        try:
            for on_host, items in zip(host, counts, strict=True):
                batch = mapped(on_host, lambda t: t.to(self.device))
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
        """Return all parameters by name, on the host."""
        parameters = dict(self.model.named_parameters())
        if isinstance(self._criterion, nn.Module):
            own = self._criterion.named_parameters()
            parameters |= {CRITERION + name: parameter for name, parameter in own}
        return {name: parameter.detach().cpu() for name, parameter in parameters.items()}


def dtype_of(config: RunConfig) -> torch.dtype:
    """Return the dtype of both sides."""
    return torch.float64 if config.verify.dtype == "float64" else torch.float32


def collate_for(config: RunConfig) -> Callable[[Any], Any]:
    """Return what collates samples to a batch with floating-point tensors of ``verify.dtype``."""
    dtype = dtype_of(config)

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return lambda samples: mapped(collate_pairs(samples), convert)


def make_samples(config: RunConfig, parts: int) -> Dataset[Any]:
    """Return the training data of both sides, the first samples of a stream; a collective."""
    data: Dataset[Any] = build.make_data(config.data).train
    if length_of(data) is not None:
        return data
    stream: Any = data
    microbatches = config.verify.steps * config.accumulation.steps * parts
    first: Any = on_first(lambda: list(islice(stream, microbatches * config.data.batch_size)))
    return first  # type: ignore[no-any-return]


def make_model(config: RunConfig) -> nn.Module:
    """Make the model without dropout, with the same weights on every rank."""
    torch.manual_seed(config.seed)
    model = build.maker(config.model)().to(build.device_of(config.device), dtype_of(config))
    assert isinstance(model, nn.Module)
    switch_off_dropout(model)
    return model


def make_criterion(config: RunConfig) -> Criterion | None:
    """Make the criterion of the run, if it names one."""
    criterion = build.make_criterion(config.loss)
    if isinstance(criterion, nn.Module):
        criterion.to(build.device_of(config.device), dtype_of(config))
    return criterion


def make_mode(config: RunConfig, name: str) -> tuple[ClipMode, bool]:
    """Make a clipping mode; also return True if its threshold is still to be derived."""
    chosen = config.clip
    if name == chosen.mode:
        return build_mode(chosen.kind, **chosen.options), False
    described = built_in(name)
    info = described.info
    # A mode that needs the optimizer has nothing to compare with in the first step.
    known = info.needs_optimizer or "threshold" in described.at_once
    derived = info.takes_threshold and not known
    threshold = NEVER if derived else info.published[0][0] if info.needs_optimizer else None
    options = {"threshold": threshold, "norm_type": chosen.norm_type}
    return build_mode(name, **{**options, **described.at_once}), derived


def make_optimizer(
    config: RunConfig, model: nn.Module, criterion: Criterion | None, mode: ClipMode
) -> torch.optim.Optimizer:
    """Make plain SGD, because the steps of Adam and similar optimizers hide a wrong scale."""
    own = criterion.parameters() if isinstance(criterion, nn.Module) else ()
    parameters = dict.fromkeys([*model.parameters(), *own])
    if mode.info.needs_optimizer:
        return torch.optim.AdamW(parameters, lr=config.verify.lr / 10, eps=1e-3)
    return torch.optim.SGD(parameters, lr=config.verify.lr)


def switch_off_dropout(model: nn.Module) -> int:
    """Set all dropout probabilities to 0, because ranks draw other elements than one process."""
    found = 0
    for module in model.modules():
        kind = type(module).__name__.lower()
        drops = "drop" in kind or "stochasticdepth" in kind
        for name, value in list(vars(module).items()):
            is_chance = isinstance(value, int | float) and not isinstance(value, bool)
            named = "drop" in name.lower() or (drops and name in ("p", "prob"))
            if is_chance and named and 0 < value <= 1:
                setattr(module, name, 0.0)
                found += 1
    return found
