"""The RMS of g/√v of each tensor, with v after the step, from one read of gradients and moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runner.clip import transfer
from runner.clip.layout import Layout
from runner.clip.norms import (
    FULL,
    OVERFLOWS,
    VANISHES,
    Powers,
    combine,
    flatten,
    local_powers,
    power_sum,
)
from runner.clip.second_moment import Moment, SecondMoments
from runner.clip.shard import ParamShard
from runner.clip.transfer import Number

BLOCK = 2**17
"""Elements that are read together on a CPU: they and what is computed of them stay in a cache."""

CHUNK = 2**26
"""Elements for which an accelerator computes together, which bounds the memory that it takes."""


class TensorRms(NamedTuple):
    """What one read of gradients and second moments tells; the same on every rank.

    Attributes:
        norm: ‖G‖.
        powers: share of each gradient of this rank in the norm; None if it is not known.
        rms: RMS of each tensor of ``layout.names``, [parameters], on the device of the layout in
            its widest type; 0 where nothing is stepped.
        present: whether an optimizer steps the tensor with a gradient, [parameters].
    """

    norm: Number
    powers: Powers | None
    rms: Tensor
    present: Tensor


def rms_of_tensors(
    layout: Layout, moments: SecondMoments, eps: float, norm_type: float, each: bool
) -> TensorRms:
    """Measure the gradients of ``layout`` and what they are divided by.

    One collective. With ZeRO stage 1 the rank that has the second moment of a tensor measures it;
    where several ranks step the same elements, each of them counts them.
    """
    shards, gradients = layout.gradients()
    host = transfer.can_read(layout.device)
    stepped = [moments.steps(shard) for shard in shards]
    own = [(s, g) for s, g, known in zip(shards, gradients, stepped, strict=True) if known]
    power: Number
    powers: Powers | None
    ratios: Sequence[float] | Tensor
    if host and norm_type == 2.0:
        squares, ratios = _on_host(own, moments, eps)
        rest = [g for g, known in zip(gradients, stepped, strict=True) if not known]
        others = iter([power_sum([gradient]) for gradient in rest])
        mine = iter(squares)
        shares = [
            next(mine if known else others) / shard.num_replicas
            for shard, known in zip(shards, stepped, strict=True)
        ]
        power, powers = float(sum(shares)), Powers(shards, shares, 2.0)
    else:
        power, powers = local_powers(layout, norm_type, each)
        ratios = _on_host(own, moments, eps)[1] if host else _on_accelerator(own, moments, eps)
    device = layout.device
    names = max(len(moments.index), 1)
    figures = torch.zeros(2, names, dtype=transfer.widest(device), device=device)
    if own:
        at = transfer.on_device([moments.index[s.name] for s, _ in own], device).long()
        sums = ratios if isinstance(ratios, Tensor) else transfer.on_device(ratios, device)
        figures[0].index_add_(0, at, sums)
        sizes = transfer.on_device([float(g.numel()) for _, g in own], device)
        figures[1].index_add_(0, at, sizes)
    row = torch.cat([transfer.on_device([power], device), figures.view(-1)])
    every = layout.rows_of_ranks(row)
    column = every[:, 0]
    norm = combine(column.tolist() if host else list(column.unbind()), norm_type)
    total = every[:, 1:].sum(0).view(2, -1)
    return TensorRms(norm, powers, (total[0] / total[1].clamp(min=1.0)).sqrt(), total[1] > 0)


Own = Sequence[tuple[ParamShard, Tensor]]
"""Shards that this rank steps, and their gradients."""


def _on_host(own: Own, moments: SecondMoments, eps: float) -> tuple[list[float], list[float]]:
    """Return Σg² and Σg²/max(v, ε²) of each gradient."""
    powers, ratios = [], []
    room: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    for shard, gradient in own:
        moment = moments.of(shard)
        squared = moment.squared(shard, gradient)
        correction = float(moment.correction())
        power, ratio = _sums(squared, moment, correction * eps * eps, room)
        powers.append(power if squared is gradient else power_sum([gradient]))
        ratios.append(ratio * correction)
    return powers, ratios


def _sums(
    gradient: Tensor, moment: Moment, least: float, room: dict[torch.dtype, tuple[Tensor, Tensor]]
) -> tuple[float, float]:
    """Return Σg² and Σg²/max(β·v + (1 − β)·g², ``least``)."""
    power = ratio = 0.0
    for g, v in blocks(gradient, moment.value):
        if g.dtype not in room:
            room[g.dtype] = (torch.empty(BLOCK, dtype=g.dtype), torch.empty(BLOCK, dtype=g.dtype))
        squares, divisors = (each[: len(g)] for each in room[g.dtype])
        part, share = _sums_of(g, v, moment.beta, least, squares, divisors)
        if not VANISHES < part < OVERFLOWS:
            wide, old = g.double(), None if v is None else v.double()
            part, share = _sums_of(wide, old, moment.beta, least, wide.clone(), wide.clone())
        power, ratio = power + part, ratio + share
    return power, ratio


def _sums_of(
    g: Tensor, v: Tensor | None, beta: float, least: float, squares: Tensor, divisors: Tensor
) -> tuple[float, float]:
    torch.mul(g, g, out=squares)
    if v is None:
        torch.mul(squares, 1.0 - beta, out=divisors)
    else:
        torch.lerp(squares, v, beta, out=divisors)
    divisors.clamp_(min=least)
    return squares.sum().item(), torch.div(squares, divisors, out=divisors).sum().item()


def blocks(gradient: Tensor, value: Tensor | None) -> Sequence[tuple[Tensor, Tensor | None]]:
    """Return blocks of all elements of a gradient with those of its second moment."""
    if value is None or value.stride() == gradient.stride():
        flat, other = flatten(gradient), None if value is None else flatten(value)
    else:
        flat, other = gradient.reshape(-1), value.reshape(-1)
    dtype = flat.dtype if flat.dtype in FULL else torch.float32
    parts = [part.to(dtype) for part in torch.split(flat, BLOCK)]
    if other is None:
        return [(part, None) for part in parts]
    return list(zip(parts, [p.to(dtype) for p in torch.split(other, BLOCK)], strict=True))


def _on_accelerator(own: Own, moments: SecondMoments, eps: float) -> Tensor | Sequence[float]:
    """Return Σg²/max(v, ε²) of each gradient, [gradients]; the host does not wait."""
    sums: list[Tensor] = []
    for chunk in chunks(own):
        known = [moments.of(shard) for shard, _ in chunk]
        squares = [
            wide(moment.squared(shard, gradient)).square()
            for (shard, gradient), moment in zip(chunk, known, strict=True)
        ]
        divisors = [
            (1.0 - moment.beta) * square
            if moment.value is None
            else torch.lerp(square, wide(moment.value), moment.beta)
            for square, moment in zip(squares, known, strict=True)
        ]
        corrections = [moment.correction() for moment in known]
        for divisor, correction in zip(divisors, corrections, strict=True):
            divisor.div_(correction)
        torch._foreach_clamp_min_(divisors, eps * eps)
        torch._foreach_div_(squares, divisors)
        dtype = transfer.widest(squares[0].device)
        sums += torch._foreach_norm(squares, 1.0, dtype=dtype)
    return torch.stack(sums) if sums else ()


def chunks(own: Own) -> Sequence[Own]:
    """Return the gradients in lists of about ``CHUNK`` elements."""
    found: list[list[tuple[ParamShard, Tensor]]] = []
    elements = math.inf
    for shard, gradient in own:
        elements += gradient.numel()
        if elements > CHUNK:
            found.append([])
            elements = gradient.numel()
        found[-1].append((shard, gradient))
    return found


def wide(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor in ``dtype`` at least."""
    return tensor.to(torch.promote_types(tensor.dtype, dtype))
