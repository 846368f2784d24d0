"""Collectives: differentiable, of many tensors in few flat buffers, and work of the first rank.

The differentiable pairs come from Shoeybi et al. 2019 (arXiv 1909.08053, section 3) and, along
the sequence, from Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2.2). Shards are as in
:func:`torch.chunk`, so the last ones may be shorter or empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from runner.gradients.transfer import SHORT, start_gather

T = TypeVar("T")

BUCKET = 25 * 2**20  # approximate size of a flat buffer in bytes
LARGE = 2**20  # bytes of a tensor that is broadcast without a buffer


def span(length: int, shards: int, index: int) -> tuple[int, int]:
    """Return the start and the length of shard ``index`` of a dimension of ``length`` elements."""
    size = -(-length // shards)
    start = min(index * size, length)
    return start, min(size, length - start)


def copy_to(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``tensor``, equal on all ranks. Backward: all-reduce of the gradients."""
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
        forward=lambda shard: _all_gather(shard, dim, length, group),
        backward=lambda gradient: _shard(gradient, dim, group, sums=sums),
    )


def split(tensor: Tensor, dim: int, group: dist.ProcessGroup, *, sums: bool = False) -> Tensor:
    """Return this rank's shard of ``tensor``. Backward: all shards of the gradient."""
    length = tensor.shape[dim]
    return _apply(
        tensor,
        forward=lambda whole: _shard(whole, dim, group, sums=sums),
        backward=lambda gradient: _all_gather(gradient, dim, length, group),
    )


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, run: Any, backward: Any) -> Any:
        ctx.run = backward
        return run(tensor)

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
    missing = span(length, ranks, 0)[1] - shard.shape[dim]
    padded = shard.contiguous()
    if missing:
        shape = list(shard.shape)
        shape[dim] = missing
        padded = torch.cat([shard, shard.new_zeros(shape)], dim=dim)
    shards = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(shards, padded, group=group)
    parts = []
    for index, padded_shard in enumerate(shards):
        _, size = span(length, ranks, index)
        parts.append(padded_shard.narrow(dim, 0, size))
    return torch.cat(parts, dim=dim)


def all_reduce(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, divisor: int | None = None
) -> None:
    """Sum ``tensors`` over ``group`` in place, half precision in float32, and divide the sums."""
    for bucket in buckets(tensors):
        flat = flat_of(bucket)
        dist.all_reduce(flat, group=group)
        if divisor is not None:
            flat.mul_(1.0 / divisor)
        unpack(flat, bucket)


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Copy the ``tensors`` of rank ``source`` of ``group`` to its other ranks, in place.

    Large ones travel as they are, small ones in a buffer: a copy of all would take memory.
    """
    if group.size() == 1:
        return
    packed: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() >= LARGE and tensor.is_contiguous():
            dist.broadcast(tensor, group=group, group_src=source)
        elif tensor.numel():
            packed.append(tensor)
    for bucket in buckets(packed, limit=LARGE):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat, group=group, group_src=source)
        if group.rank() != source:
            unpack(flat, bucket)


def on_any_rank(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return for each flag whether a rank of ``group`` sets it; without a group, the flags."""
    if group is None or group.size() == 1:
        return list(flags)
    # On the host, so that no accelerator is waited for.
    if len(flags) > SHORT:
        set_by_any = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(set_by_any, op=dist.ReduceOp.MAX, group=group)
        return [flag > 0 for flag in set_by_any.tolist()]
    wait = start_gather(torch.tensor(flags), group)
    of_any: list[bool] = wait().any(0).tolist()
    return of_any


def buckets(tensors: Sequence[Tensor], limit: int = BUCKET) -> Iterator[list[Tensor]]:
    """Divide ``tensors`` into lists of one dtype and about ``limit`` bytes.

    Statistics of batch norm alternate with their integer counts, and travel apart from these.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for of_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in of_dtype:
            if size >= limit:
                yield bucket
                bucket = []
                size = 0
            bucket.append(tensor)
            size += tensor.numel() * tensor.element_size()
        yield bucket


def flat_of(bucket: Sequence[Tensor]) -> Tensor:
    """Return tensors as one vector, of float32 at least."""
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the elements of ``flat`` to ``tensors``, one after the other."""
    if not tensors:
        return
    sizes = [tensor.numel() for tensor in tensors]
    parts = torch.split(flat[: sum(sizes)], sizes)
    views = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), views)


@torch.no_grad()
def full(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor; a collective. Other tensors are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def sharded(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor of a tensor that all ranks of ``mesh`` have, without communication."""
    replicated = [Replicate()] * mesh.ndim
    replica = DTensor.from_local(whole.to(mesh.device_type), mesh, replicated, run_check=False)
    return replica.redistribute(mesh, placements)


def several_ranks() -> bool:
    """Return whether this process belongs to a group of several ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_first() -> bool:
    """Return whether this process is the first rank, or the only one."""
    return not several_ranks() or dist.get_rank() == 0


def from_all(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank; every rank has to call this."""
    every = [mine] * (dist.get_world_size(group) if dist.is_initialized() else 1)
    if len(every) > 1:
        dist.all_gather_object(every, mine, group=group)
    return every


def raise_first(problem: str, alone: bool = False) -> None:
    """Raise the first problem of any rank as a ValueError; every rank calls this unless alone."""
    problems = [problem] if alone else from_all(problem)
    for of_rank in problems:
        if of_rank:
            raise ValueError(of_rank)


def on_first(work: Callable[[], T]) -> T:
    """Call ``work`` on the first rank alone; every rank has to call this."""
    result: list[Any] = [None, None]
    if is_first():
        try:
            result[0] = work()
        except Exception as error:  # the other ranks wait for it
            result[1] = error
    if several_ranks():
        dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise result[1]
    returned: T = result[0]
    return returned
