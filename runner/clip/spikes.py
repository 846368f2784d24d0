"""Elements of this rank's gradients that are large beside their second moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.layout import Layout
from runner.clip.norms import OVERFLOWS, VANISHES, Powers, combine, power_sum
from runner.clip.second_moment import SecondMoments
from runner.clip.shard import ParamShard
from runner.clip.transfer import Number
from runner.clip.update_rms import BLOCK, blocks, wide


class Compared(NamedTuple):
    """A gradient that is compared with its second moment.

    Attributes:
        gradient: local shard of the gradient.
        value: v of each element, of the same shape.
        ready: whether v has averaged enough steps: 1 or 0, a tensor where only an accelerator
            knows.
        copies: number of ranks that compare the same elements.
        above: number of elements above θ·v.
        dtype: type that holds their squares.
    """

    gradient: Tensor
    value: Tensor
    ready: Number
    copies: float
    above: Number = 0.0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Spikes:
    """What is clamped on this rank, and what was measured to find it.

    Attributes:
        shards: all shards with a gradient.
        powers: Σg² of each of them on a CPU; nothing on an accelerator.
        compared: gradients that are compared with a second moment.
        changed: number of elements above θ·v, each divided by the ranks that compare it.
        total: number of elements that optimizers step, each divided by the ranks that step it.
        largest: largest g²/v.
        clamped_power: this rank's share of ‖G‖² after clamping.
        weights: for each shard 1 ÷ the number of ranks that count it after clamping, or 0.
    """

    shards: Sequence[ParamShard]
    powers: Sequence[float]
    compared: Sequence[Compared]
    changed: Number
    total: float
    largest: Number
    clamped_power: Number
    weights: Sequence[float]

    @classmethod
    def of(cls, layout: Layout, moments: SecondMoments, limit: float, min_steps: int) -> Spikes:
        """Compare the gradients of ``layout`` with θ = ``limit`` times their second moments."""
        shards, gradients = layout.gradients()
        host = transfer.can_read(layout.device)
        weights = [_weight(shard, moments) for shard in shards]
        powers: list[Number] = []
        clamped: list[Number] = []
        maxima: list[Number] = []
        compared = []
        total = 0.0
        for shard, gradient, weight in zip(shards, gradients, weights, strict=True):
            one = _compared(shard, gradient, moments, min_steps)
            if moments.steps(shard):
                total += gradient.numel() * weight
            if one is None:
                power: Number = power_sum([gradient]) if host else _power(wide(gradient))
                powers.append(power)
                clamped.append(power)
                continue
            read = _on_host(one, limit) if host else _on_accelerator(one, limit)
            powers.append(read.power)
            clamped.append(read.clamped)
            maxima.append(read.largest)
            compared.append(one._replace(above=read.above, dtype=read.dtype))
        return cls(
            shards,
            [power for power in powers if not isinstance(power, Tensor)],
            compared,
            _sum([one.above / one.copies for one in compared]),
            total,
            combine(maxima or [0.0], math.inf),
            _sum([power * weight for power, weight in zip(clamped, weights, strict=True)]),
            weights,
        )

    def weighted(self, powers: Powers) -> Number:
        """Return this rank's share of ‖G‖^p (its largest |g| for p = inf) of clamped gradients."""
        each = powers.each if isinstance(powers.each, Tensor) else list(powers.each)
        if math.isinf(powers.norm_type):
            kept = [power for power, weight in zip(each, self.weights, strict=True) if weight]
            return combine(kept or [0.0], math.inf)
        triples = zip(each, self.weights, powers.shards, strict=True)
        return _sum([power * weight * shard.num_replicas for power, weight, shard in triples])


class _Read(NamedTuple):
    power: Number
    clamped: Number
    largest: Number
    above: Number
    dtype: torch.dtype = torch.float32


def _weight(shard: ParamShard, moments: SecondMoments) -> float:
    """Return 1 ÷ the ranks that count a shard: those that step it, or all that have it."""
    copies = moments.copies[shard.name]
    if not copies:
        return 1.0 / shard.num_replicas
    return 1.0 / copies if moments.steps(shard) else 0.0


def _compared(
    shard: ParamShard, gradient: Tensor, moments: SecondMoments, min_steps: int
) -> Compared | None:
    """Return what is compared; None where the shard is stepped elsewhere, or has no state yet."""
    if not moments.steps(shard):
        return None
    moment = moments.of(shard)
    ready = moment.steps >= min_steps
    if moment.value is None or ready is False:
        return None
    known = ready if isinstance(ready, Tensor) else 1.0
    return Compared(gradient, moment.value, known, moments.copies[shard.name])


def _on_host(one: Compared, limit: float) -> _Read:
    power = clamped = largest = above = 0.0
    room: Tensor | None = None
    dtype = torch.float32
    for g, v in blocks(one.gradient, one.value):
        assert v is not None
        if room is None:
            room = torch.empty(2, BLOCK, dtype=g.dtype)
        squares, ratio = room[0, : len(g)], room[1, : len(g)]
        part = torch.mul(g, g, out=squares).sum().item()
        if not VANISHES < part < OVERFLOWS:
            dtype = torch.float64
            g, v = g.double(), v.double()
            squares = g.square()
            part, ratio = squares.sum().item(), torch.empty_like(squares)
        most = torch.div(squares, v, out=ratio).amax().item()
        if not most < math.inf:  # v of some elements is 0
            most = ratio.masked_fill_(v == 0, 0.0).amax().item()
        power, after = power + part, part
        if most > limit:
            spikes = ratio > limit
            above += spikes.sum().item()
            after = torch.where(spikes, v * limit, squares).sum().item()
        clamped += after
        largest = combine([largest, most], math.inf)  # type: ignore[assignment]
    return _Read(power, clamped, largest, above, dtype)


def _on_accelerator(one: Compared, limit: float) -> _Read:
    squares, v = wide(one.gradient).square(), wide(one.value)
    ratio = ratios(one)
    spikes = ratio > limit
    dtype = transfer.widest(squares.device)
    return _Read(
        squares.sum(dtype=dtype),
        torch.where(spikes, v * limit, squares).sum(dtype=dtype),
        ratio.amax().to(dtype),
        transfer.count(spikes),
    )


def ratios(one: Compared) -> Tensor:
    """Return g²/v of each element; 0 where v is 0 or has averaged too few steps."""
    v = wide(one.value, one.dtype)
    ratio = wide(one.gradient, one.dtype).square().div_(v).masked_fill_(v == 0, 0.0)
    return ratio.where(one.ready, 0.0) if isinstance(one.ready, Tensor) else ratio


def clamp(found: Spikes, limit: float) -> None:
    """Clamp elements above θ·v in place, with their sign."""
    for one in found.compared:
        if not isinstance(one.above, Tensor) and one.above == 0:
            continue
        bound = (wide(one.value, one.dtype) * limit).sqrt_().to(one.gradient.dtype)
        clamped = bound.copysign_(one.gradient)
        one.gradient.copy_(torch.where(ratios(one) > limit, clamped, one.gradient))


def _power(tensor: Tensor) -> Tensor:
    power: Tensor = torch.linalg.vector_norm(tensor, dtype=transfer.widest(tensor.device)).square()
    return power


def _sum(values: Sequence[Number]) -> Number:
    total: Number = 0.0
    for value in values:
        total = total + value
    return total
