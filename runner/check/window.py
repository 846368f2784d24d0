"""The microbatches of one window, and the gradients that they give with any weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.check.parts import Part
from runner.check.ranks import Ranks
from runner.gradients.shard import local

SumOfLosses = Callable[[nn.Module, Any], tuple[Tensor, float]]
"""Returns the sum of the item losses of a microbatch, and the number of its items."""

Gradient = list[Tensor | None]
"""The local gradient of each part, None where there is none."""


class Fit(NamedTuple):
    """How a gradient G compares with another one, R.

    Attributes:
        scale: α of the best fit G ≈ α·R.
        residual: ‖G − α·R‖ ÷ ‖G‖.
        error: ‖G − R‖ ÷ ‖R‖.
    """

    scale: float
    residual: float
    error: float


@dataclass
class Window:
    """The microbatches of one window, with the random state before each.

    Attributes:
        model: the module inside of wrappers.
        loss: returns the sum of the item losses of a microbatch, and the number of its items.
        parts: the trained parameters on this rank.
        ranks: all of them are data-parallel.
        batches: the microbatches of this rank.
        random: the random state before each microbatch.
        weights: the weights that the window was run with, if the optimizer has stepped since.
    """

    model: nn.Module
    loss: SumOfLosses
    parts: list[Part]
    ranks: Ranks
    batches: list[Any] = field(default_factory=list)
    random: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shards = _is_fully_sharded(self.model)

    def gradient_now(self) -> Gradient:
        """Return a copy of the gradient that the parameters have."""
        copies: Gradient = []
        for part in self.parts:
            gradient = part.gradient
            copies.append(None if gradient is None else gradient.clone())
        return copies

    def count_items(self) -> list[list[float]]:
        """Return the items of each microbatch on each rank; a collective."""
        items_here: list[float] = []
        with torch.no_grad(), self._restored():
            for batch, random in zip(self.batches, self.random, strict=True):
                torch.set_rng_state(random)
                _, items = self.loss(self.model, batch)
                items_here.append(float(items))
        counts: list[list[float]] = self.ranks.gather(items_here)
        return counts

    def gradient(self, weights: Sequence[float]) -> Gradient:
        """Return the gradient of Σ weight·(sum of losses), averaged over ranks; a collective."""
        if self.shards:
            return self._sharded_gradient(weights)
        gradient = self.gradient_alone(weights)
        if self.ranks.group is None:
            return gradient
        averaged: Gradient = []
        for part, tensor in zip(self.parts, gradient, strict=True):
            if tensor is None:
                tensor = torch.zeros_like(local(part.parameter.detach()))
            dist.all_reduce(tensor, group=self.ranks.group)
            averaged.append(tensor.div_(self.ranks.size))
        return averaged

    def gradient_alone(self, weights: Sequence[float]) -> Gradient:
        """Return this rank's gradient, without the hooks of DistributedDataParallel."""
        parameters = [part.parameter for part in self.parts]
        total: Gradient = [None] * len(parameters)
        with self._restored(), torch.enable_grad():
            for batch, random, weight in zip(self.batches, self.random, weights, strict=True):
                torch.set_rng_state(random)
                losses, _ = self.loss(self.model, batch)
                gradients = torch.autograd.grad(losses * weight, parameters, allow_unused=True)
                total = added(total, [None if g is None else local(g) for g in gradients])
        return total

    def _sharded_gradient(self, weights: Sequence[float]) -> Gradient:
        """Return this rank's shards of the gradient, which ``fully_shard`` averages."""
        gradients = [part.parameter.grad for part in self.parts]
        for part in self.parts:
            part.parameter.grad = None
        try:
            with self._restored(), torch.enable_grad():
                for batch, random, weight in zip(self.batches, self.random, weights, strict=True):
                    torch.set_rng_state(random)
                    losses, _ = self.loss(self.model, batch)
                    (losses * weight).backward()  # type: ignore[no-untyped-call]
            return self.gradient_now()
        finally:
            for part, gradient in zip(self.parts, gradients, strict=True):
                part.parameter.grad = gradient

    def _restored(self) -> _Restored:
        return _Restored(self.model, self.parts, self.weights)

    def fit(self, gradient: Gradient, reference: Gradient) -> Fit:
        """Compare a gradient with another one; a collective."""
        squares = 0.0
        squares_of_reference = 0.0
        products = 0.0
        for first, second in zip(gradient, reference, strict=True):
            g = None if first is None else first.double().reshape(-1)
            r = None if second is None else second.double().reshape(-1)
            squares += _dot(g, g)
            squares_of_reference += _dot(r, r)
            products += _dot(g, r)
        rows = self.ranks.gather((squares, squares_of_reference, products))
        gg, rr, gr = (math.fsum(column) for column in zip(*rows, strict=True))
        if not (math.isfinite(gg) and rr > 0):
            return Fit(math.nan, math.inf, math.inf if gg != rr else 0.0)
        off = max(gg - 2 * gr + rr, 0.0)
        unexplained = max(gg - gr * gr / rr, 0.0)
        residual = math.sqrt(unexplained / gg) if gg else 0.0
        return Fit(gr / rr, residual, math.sqrt(off / rr))


def added(first: Gradient, second: Gradient) -> Gradient:
    """Return the sum of two gradients."""
    sums: Gradient = []
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            sums.append(b if a is None else a)
        else:
            sums.append(a + b)
    return sums


def _dot(first: Tensor | None, second: Tensor | None) -> float:
    return 0.0 if first is None or second is None else float(torch.dot(first, second))


class _Restored:
    """Uses the weights of the window; what a pass changes is put back after it."""

    def __init__(self, model: nn.Module, parts: Sequence[Part], weights: Sequence[Tensor]) -> None:
        self._model = model
        self._pairs = [
            (local(part.parameter.detach()), weight)
            for part, weight in zip(parts, weights, strict=False)
        ]

    @torch.no_grad()
    def __enter__(self) -> None:
        self._random = torch.get_rng_state()
        self._kept = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        for current, weight in self._pairs:
            self._kept.append((current, current.clone()))
            current.copy_(weight)

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._random)
        for tensor, kept in self._kept:
            tensor.copy_(kept)


def _is_fully_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
