"""Measure the gradient of each microbatch on this rank, before ranks combine their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from runner.booster import OptimizerWrapper, Plugin
from runner.booster.loss import Count
from runner.clip import Number, transfer
from runner.clip.norms import local_power, power_sum
from runner.clip.shard import local
from runner.parallel.hooks import computed_with
from runner.telemetry.statistics import NoiseShare
from runner.train.passes import Passes


class MicrobatchNorms:
    """Measures what the estimates of the gradient noise scale need of a step on this rank."""

    def __init__(self, plugin: Plugin, optimizer: OptimizerWrapper, passes: Passes) -> None:
        experts = getattr(getattr(plugin, "sizes", None), "ep", 1)
        if plugin.data_size != plugin.world_size or experts > 1:
            raise ValueError(
                "the gradient noise scale needs ranks that have the whole gradient of their "
                "samples: no tensor, pipeline or expert parallelism"
            )
        self._plugin, self._optimizer, self._passes = plugin, optimizer, passes
        self._hooks: list[RemovableHandle] = []
        self._powers: list[list[Number]] = []  # of each microbatch, of each gradient
        self._sums: dict[int, Tensor] = {}  # of the gradients of several microbatches
        self._summed: list[Number] = []  # their powers, once they are complete

    def begin(self, microbatches: int) -> None:
        """Measure the backward passes of a step of so many microbatches."""
        self.stop()
        self._powers = [[] for _ in range(microbatches)]
        for number, shard in enumerate(self._optimizer.layout.shards):
            parameter = computed_with(shard.param)
            if parameter.requires_grad:
                hook = partial(self._note, number)
                self._hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def end(self, items: Sequence[float | None], total: Count, norm_type: float) -> NoiseShare:
        """Return this rank's share after the backward passes, before gradients are clipped."""
        size, layout, loss_scale = self._plugin.data_size, self._optimizer.layout, 1.0
        if self._optimizer.loss_scale is not None:
            loss_scale = self._optimizer.loss_scale.scale
        # Each gradient of a rank is ``size`` times its part of the mean over ranks. So is its part
        # of a sum over ranks, which is a mean of what is returned.
        unit = total.items / (size * loss_scale**2)
        parts = [(n, powers) for n, powers in zip(items, self._powers, strict=True) if n]
        each = [_total(powers) * (unit / n) for n, powers in parts]
        rank: Number = math.nan  # where it is not measured, it is that of the step
        if len(parts) <= 1:
            rank = each[0] if each else 0.0
        elif size > 1:
            left = [_power(gradient) for gradient in self._sums.values()]
            rank = _total([*self._summed, *left]) * (unit / sum(n for n, _ in parts))
        self.stop()
        whole: Number = math.nan  # the norm that clipping measures
        if norm_type != 2.0:
            self._optimizer.begin_clip()
            # Where a rank holds the whole gradient, each of them has the same one.
            whole = local_power(layout, 2.0) * (1.0 if layout.group is None else size)
        counts = (float(size * len(parts)), float(size * bool(parts)), float(total.samples))
        return NoiseShare(_total(each), rank, whole, *counts)

    @torch.no_grad()
    def _note(self, number: int, gradient: Tensor) -> None:
        """Measure the gradient of parameter ``number`` in one microbatch."""
        here = local(gradient.detach())
        if here.layout is not torch.strided or not here.numel():
            return
        at, count = self._passes.microbatch, len(self._powers)
        self._powers[at - 1].append(_power(here))
        if count == 1 or self._plugin.data_size == 1:
            return
        before = self._sums.pop(number, None)
        if at == count:
            self._summed.append(_power(here if before is None else before.add_(here)))
        else:
            # A copy, because autograd may add further microbatches to this one in place.
            self._sums[number] = here.clone() if before is None else before.add_(here)

    def stop(self) -> None:
        """Remove hooks, and forget the step."""
        while self._hooks:
            self._hooks.pop().remove()
        self._powers, self._sums, self._summed = [], {}, []


def _power(gradient: Tensor) -> Number:
    """Return Σ g²."""
    if transfer.can_read(gradient.device):
        return power_sum([gradient])
    wide = transfer.widest(gradient.device)
    power: Tensor = torch.linalg.vector_norm(gradient, dtype=wide).square()
    return power


def _total(values: Sequence[Number]) -> Number:
    """Return the sum of numbers: floats, or tensors on one accelerator."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.stack(tensors).sum() if tensors else float(sum(values))
