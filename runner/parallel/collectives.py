"""Differentiable collectives between the ranks that share a layer.

The pairs of forward and backward operations are those of Shoeybi et al. 2019 (arXiv 1909.08053,
section 3) and, along the sequence, of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2.2).
Shards are those of :func:`torch.chunk`, so the last ones may be shorter or empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def span(length: int, shards: int, index: int) -> tuple[int, int]:
    """Return the start and the length of shard ``index`` of a dimension of ``length`` elements."""
    size = -(-length // shards)
    start = min(index * size, length)
    return start, min(size, length - start)


def copy_to(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``tensor``, equal on all ranks, for ranks that each compute a part of the layer.

    Backward: all-reduce of the gradients.
    """
    return _apply(tensor, lambda t: t.view_as(t), lambda g: _all_reduce(g, group))


def sum_of(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks. Backward: the gradient, which is equal on all ranks."""
    return _apply(tensor, lambda t: _all_reduce(t, group), lambda g: g)


def gather(
    tensor: Tensor, dim: int, length: int, group: dist.ProcessGroup, *, sums: bool
) -> Tensor:
    """Return all shards, concatenated. Backward: this rank's shard of the gradient."""
    return _apply(
        tensor,
        lambda t: _all_gather(t, dim, length, group),
        lambda g: _shard(g, dim, group, sums=sums),
    )


def scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup, *, sums: bool) -> Tensor:
    """Return this rank's shard of ``tensor``. Backward: all shards of the gradient,
    concatenated.
    """
    length = tensor.shape[dim]
    if length % group.size():
        raise ValueError(
            f"a sequence of {length} cannot be split evenly over tp_size "
            f"{group.size()}: choose a length that it divides, or sequence_parallel=false"
        )
    return split(tensor, dim, group, sums=sums)


def split(tensor: Tensor, dim: int, group: dist.ProcessGroup, *, sums: bool = False) -> Tensor:
    """Like :func:`scatter`, for ranks that need not divide the dimension evenly."""
    length = tensor.shape[dim]
    return _apply(
        tensor,
        lambda t: _shard(t, dim, group, sums=sums),
        lambda g: _all_gather(g, dim, length, group),
    )


class _Collective(torch.autograd.Function):
    """Run one function of a tensor forward, and another one of its gradient backward."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.run = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run(gradient), None, None


def _apply(
    tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    output: Tensor = _Collective.apply(tensor, forward, backward)
    return output


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    summed = tensor.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed


def _shard(tensor: Tensor, dim: int, group: dist.ProcessGroup, *, sums: bool) -> Tensor:
    whole = _all_reduce(tensor, group) if sums else tensor
    start, length = span(whole.shape[dim], group.size(), group.rank())
    return whole.narrow(dim, start, length).contiguous()


def _all_gather(shard: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    ranks = group.size()
    size = span(length, ranks, 0)[1]
    padded = shard.contiguous()
    if shard.shape[dim] < size:
        shape = list(shard.shape)
        shape[dim] = size - shard.shape[dim]
        padded = torch.cat([shard, shard.new_zeros(shape)], dim=dim)
    shards = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(shards, padded, group=group)
    parts = [each.narrow(dim, 0, span(length, ranks, i)[1]) for i, each in enumerate(shards)]
    return torch.cat(parts, dim=dim)
