"""Collectives of many tensors in few flat buffers, and of flags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from runner.clip.exchange import start_gather

BUCKET = 25 * 2**20
"""Approximate size of a buffer in bytes."""


def all_reduce(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, divisor: int | None = None
) -> None:
    """Sum ``tensors`` over the ranks of ``group`` in place, and divide the sums by ``divisor``.

    Half precision is summed in float32, so that the sum over many ranks stays accurate.
    """
    for bucket in buckets(tensors):
        flat = flat_of(bucket)
        dist.all_reduce(flat, group=group)
        if divisor is not None:
            flat.mul_(1.0 / divisor)
        _copy_back(flat, bucket)


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Copy the ``tensors`` of rank ``source`` of ``group`` to its other ranks, in place."""
    if group.size() == 1:
        return
    for bucket in buckets([tensor for tensor in tensors if tensor.numel()]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat, group=group, group_src=source)
        if group.rank() != source:
            _copy_back(flat, bucket)


def on_any_rank(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return for each flag whether a rank of ``group`` sets it; without a group, the flags.

    On the host, so that no accelerator is waited for.
    """
    if group is None or group.size() == 1:
        return list(flags)
    found: list[bool] = start_gather(torch.tensor(flags), group)().any(0).tolist()
    return found


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide ``tensors`` into runs of one dtype and about ``BUCKET`` bytes."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size >= BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket


def flat_of(bucket: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one dtype in one vector, in float32 or wider."""
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def _copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
