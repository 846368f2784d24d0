"""Making gradients final: what the ranks that share a parameter have is added up, once a step.

Not in each backward pass, because a window has several, and because gradients of tied copies and
partial sums would be added again to what was added before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.clip.layout import local

BUCKET = 25 * 2**20
"""Bytes that travel in one collective, about."""


@dataclass(frozen=True)
class Replicas:
    """Parameters of which the ranks of a group hold the same copy, each with its own data.

    Attributes:
        parameters: in the same order on every rank of the group.
        group: the ranks; None where their gradients are added up already.
        divisor: of the sum. The number of data parts, also for experts, whose gradients have
            gathered those of several data parts before.
    """

    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup | None
    divisor: int


@dataclass(frozen=True)
class Tied:
    """Copies of one parameter that different pipeline stages use.

    Attributes:
        copies: on this rank.
        group: the ranks that have copies; None where all of them are here.
    """

    copies: Sequence[nn.Parameter]
    group: dist.ProcessGroup | None


class GradientSync:
    """Called once a step, on every rank, when the last backward pass is done.

    Args:
        parameters: all of them.
        replicas: those that data parts hold alike.
        tied: those that stages hold alike.
        agree: called when all gradients are final, to compare them where they should be the same.
        drop_unused: called first; sets gradients of unused sharded parameters to None.
        buffers: those that data-parallel ranks hold alike.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        replicas: Sequence[Replicas],
        tied: Sequence[Tied],
        agree: Callable[[], None],
        drop_unused: Sequence[Callable[[], None]] = (),
        buffers: Sequence[ReplicatedBuffers] = (),
    ) -> None:
        self.parameters = [p for p in parameters if isinstance(p, DTensor)]
        self.replicas = replicas
        self.tied = tied
        self.agree = agree
        self.drop_unused = drop_unused
        self.buffers = buffers

    @torch.no_grad()
    def __call__(self) -> None:
        """Resolve partial sums, average over replicas, add up tied copies: in this order."""
        for drop in self.drop_unused:
            drop()
        _resolve(self.parameters)
        for replicas in self.replicas:
            average(replicas)
        for tied in self.tied:
            _add_up(tied)
        for buffers in self.buffers:
            buffers.broadcast()
        self.agree()


class ReplicatedBuffers:
    """Buffers of which the ranks of a group hold the same copy, such as running statistics.

    Each rank updates its copy by its own samples. As under DDP, those of the group's first rank
    count: all ranks evaluate with them, and they are what is saved.

    Args:
        model: what this rank holds of the model.
        group: the data-parallel ranks.
        belongs: which buffers, by qualified name; all by default.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        belongs: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.group = group
        # By owner and key, because a forward pass may put a new tensor in the place of an old one.
        self.slots = [
            (module, key)
            for prefix, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and belongs(f"{prefix}.{key}" if prefix else key)
        ]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give every rank of the group the buffers of its first one."""
        found = [module._buffers[key] for module, key in self.slots]
        broadcast([buffer for buffer in found if buffer is not None], self.group)


@torch.no_grad()
def average(replicas: Replicas) -> None:
    """Average gradients in place. One that no rank has stays absent; one that some have is zero
    elsewhere.
    """
    parameters = [p for p in replicas.parameters if p.requires_grad]
    if replicas.group is None or replicas.group.size() == 1:
        here = [local(p.grad) for p in parameters if p.grad is not None]
        if here and replicas.divisor != 1:
            torch._foreach_mul_(here, 1.0 / replicas.divisor)
        return
    if not parameters:
        return
    # On the host, so that no accelerator is waited for.
    there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    dist.all_reduce(there, group=replicas.group)
    gradients = []
    for parameter, ranks in zip(parameters, there.tolist(), strict=True):
        if not ranks:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local(parameter.grad))
    for flat in _in_buckets(gradients):
        dist.all_reduce(flat, group=replicas.group)
        flat.mul_(1.0 / replicas.divisor)


def _resolve(parameters: Iterable[DTensor]) -> None:
    """Add up gradients that each rank of a mesh axis has a part of (a norm along the sequence)."""
    waiting: dict[dist.ProcessGroup, list[DTensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            continue
        for axis, placement in enumerate(gradient.placements):
            if placement.is_partial():
                group = gradient.device_mesh.get_group(axis)
                waiting.setdefault(group, []).append(parameter)
    for group, members in waiting.items():
        for flat in _in_buckets([local(p.grad) for p in members if p.grad is not None]):
            dist.all_reduce(flat, group=group)
    for parameter in {id(p): p for members in waiting.values() for p in members}.values():
        assert isinstance(parameter.grad, DTensor)
        parameter.grad = DTensor.from_local(
            parameter.grad.to_local(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _add_up(tied: Tied) -> None:
    copies = [p for p in tied.copies if p.requires_grad]
    if not copies:
        return
    used = torch.tensor([any(p.grad is not None for p in copies)], dtype=torch.int32)
    if tied.group is not None:
        dist.all_reduce(used, group=tied.group)
    if not used.item():
        return
    for parameter in copies:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [local(p.grad) for p in copies if p.grad is not None]
    summed = torch.stack(gradients).sum(0) if len(gradients) > 1 else gradients[0].contiguous()
    if tied.group is not None:
        dist.all_reduce(summed, group=tied.group)
    for gradient in gradients:
        gradient.copy_(summed)


def _in_buckets(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Flat buffers that hold all ``tensors``; what the caller makes of one is copied back.

    Half precision travels in float32, so that a sum over many ranks keeps its digits.
    """
    for bucket in buckets(tensors):
        wide = torch.promote_types(bucket[0].dtype, torch.float32)
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(wide)
        yield flat
        put_back(flat, bucket)


def put_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the elements of a flat buffer to the tensors they came from."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one dtype and of about :data:`BUCKET` bytes; alike on ranks that agree."""
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


@torch.no_grad()
def alike(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank the parameters and buffers of the first one.

    Ranks that drew different weights would train different models under the same name.
    """
    broadcast([tensor.detach() for tensor in (*model.parameters(), *model.buffers())], group)


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Copy the first rank's ``tensors`` to all ranks of ``group``, in place."""
    if group.size() == 1:
        return
    for bucket in buckets([tensor for tensor in tensors if tensor.numel()]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat, group=group, group_src=0)
        put_back(flat, bucket)


def synchronise_batch_norm(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Compute the batch norm layers of ``model`` over the samples of all ranks, in place.

    Args:
        model: the whole model, before its parameters are replaced.
        group: the data-parallel ranks.

    Raises:
        ValueError: the model is on a CPU, where torch has no synchronised batch norm.
    """
    device = next(model.parameters()).device.type
    if device == "cpu":
        raise ValueError(
            "sync_batchnorm=True needs GPUs, where torch.nn.SyncBatchNorm computes, but the model "
            "is on a CPU: use sync_batchnorm=False"
        )
    nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-untyped-call]
