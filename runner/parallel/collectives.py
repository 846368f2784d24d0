"""Collectives that gradients flow through, between ranks that split one layer.

The pairs are those of Shoeybi et al. 2019 (arXiv 1909.08053, section 3) and, along the sequence, of
Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2.2): what one direction copies the other sums,
what one gathers the other scatters. Parts are cut as :func:`torch.chunk` cuts them, so the last
ones may be shorter or empty.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def span(length: int, parts: int, part: int) -> tuple[int, int]:
    """Start and length of one of ``parts`` parts of ``length`` elements."""
    size = -(-length // parts)
    start = min(part * size, length)
    return start, min(size, length - start)


def own_part(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of ``tensor`` along ``dim``."""
    start, length = span(tensor.shape[dim], group.size(), group.rank())
    return tensor.narrow(dim, start, length)


def joined(part: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' parts along ``dim``, ``length`` elements in all."""
    ranks = group.size()
    size = span(length, ranks, 0)[1]
    even = part.contiguous()
    if part.shape[dim] < size:
        shape = list(part.shape)
        shape[dim] = size - part.shape[dim]
        even = torch.cat([part, part.new_zeros(shape)], dim=dim)
    parts = [torch.empty_like(even) for _ in range(ranks)]
    dist.all_gather(parts, even, group=group)
    cut = [p.narrow(dim, 0, span(length, ranks, i)[1]) for i, p in enumerate(parts)]
    return torch.cat(cut, dim=dim)


def total(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks."""
    summed = tensor.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return total(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return total(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, length: int, group: dist.ProcessGroup, sums: bool
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.sums = dim, group, sums
        return joined(tensor, dim, length, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        whole = total(gradient, ctx.group) if ctx.sums else gradient
        return own_part(whole, ctx.dim, ctx.group).contiguous(), None, None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup, sums: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.length = dim, group, tensor.shape[dim]
        whole = total(tensor, group) if sums else tensor
        return own_part(whole, dim, group).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return joined(gradient, ctx.dim, ctx.length, ctx.group), None, None, None


def copy_to(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same on every rank, each of which does a part of what follows; gradients are summed."""
    copied: Tensor = _Copied.apply(tensor, group)
    return copied


def sum_of(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what every rank has; what follows is the same on every rank."""
    summed: Tensor = _Summed.apply(tensor, group)
    return summed


def gather(
    tensor: Tensor, dim: int, length: int, group: dist.ProcessGroup, *, sums: bool
) -> Tensor:
    """All parts along ``dim``.

    Args:
        tensor: this rank's part.
        dim: along which it was cut.
        length: of all parts together.
        group: the ranks.
        sums: whether each rank does a part of what follows, so that gradients are summed; without,
            every rank does the same.
    """
    gathered: Tensor = _Gathered.apply(tensor, dim, length, group, sums)
    return gathered


def scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup, *, sums: bool) -> Tensor:
    """This rank's part along ``dim`` of a tensor, or of the ranks' sum.

    Raises:
        ValueError: the parts would not be even.
    """
    if tensor.shape[dim] % group.size():
        raise ValueError(
            f"a sequence of {tensor.shape[dim]} cannot be split evenly over tp_size "
            f"{group.size()}: choose a length that it divides, or sequence_parallel=false"
        )
    sharded_vector: Tensor = _Scattered.apply(tensor, dim, group, sums)
    return sharded_vector
