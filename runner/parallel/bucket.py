"""Gradients that travel together in one flat buffer, which is kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.gradients.shard import local
from runner.parallel import collectives
from runner.parallel.hooks import storage_uses

EDGE = 2**20
"""Most bytes of the first and the last bucket, unless one gradient is larger.

A small first one is sent early in the backward pass, and after a small last one little is left to
wait for, as in torch's DDP.
"""


SMALL = 2**14
"""Most elements of a gradient that is copied to the buffer and back with others, in one call."""


class Bucket:
    """Parameters of one data type, whose gradients are averaged over ranks in one flat buffer.

    The averages of large gradients are handed back without a copy: the gradients become parts of
    the buffer. As long as anybody holds one of them, the next step takes another buffer. Small
    gradients are copied to the buffer and back, all of them at once.

    Args:
        parameters: what the bucket holds. Every rank has the same, in the same order.
        flags: number of flags that travel behind the gradients; without parameters, all there is.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], flags: int = 0) -> None:
        self.parameters = parameters
        self.open = len(parameters)  # gradients that are not complete in this step
        # The buffer holds the small gradients, then the large ones, then the flags.
        self._small = [p for p in parameters if local(p).numel() <= SMALL]
        self._large = [p for p in parameters if local(p).numel() > SMALL]
        self._small_size = sum(local(parameter).numel() for parameter in self._small)
        self._flags = flags
        self._flat: Tensor | None = None
        self._small_parts: list[Tensor] = []  # of the buffer, as the parameters are shaped
        self._large_parts: list[Tensor] = []
        self._uses = 0  # of the memory of the buffer while no gradient is a part of it
        self._work: Any = None

    def send(self, group: dist.ProcessGroup, divisor: int, flags: Sequence[bool]) -> None:
        """Begin to average the gradients over ``group``; one that this rank lacks counts as zero.

        The gradients stay as they are. Each is divided before the sum, so that the buffer is not
        read once more; a narrow one is divided in float32.
        """
        flat = self._buffer()
        gradients: list[Tensor] = []
        parts: list[Tensor] = []
        for parameter, part in zip(self._small, self._small_parts, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                gradients.append(local(parameter.grad))
                parts.append(part)
        if parts:
            torch._foreach_copy_(parts, gradients)
            flat[: self._small_size].mul_(1.0 / divisor)
        for parameter, part in zip(self._large, self._large_parts, strict=True):
            if parameter.grad is None:
                part.zero_()
                continue
            gradient = local(parameter.grad)
            if gradient.dtype == flat.dtype:
                torch.mul(gradient, 1.0 / divisor, out=part)
            else:
                part.copy_(gradient).mul_(1.0 / divisor)
        if self._flags:
            flat[-self._flags :] = torch.tensor(flags, dtype=flat.dtype)
        self._work = dist.all_reduce(flat, group=group, async_op=True)

    def wait(self) -> list[bool]:
        """Wait for the averages; return for each flag whether any rank has set it."""
        self._work.wait()
        self._work = None
        assert self._flat is not None
        return [number > 0 for number in self._flat[len(self._flat) - self._flags :].tolist()]

    def hand_out(self, used: set[int]) -> None:
        """Make the averages the gradients of all parameters but those that no rank has ``used``."""
        assert self._flat is not None
        for parameter in self.parameters:
            if parameter.grad is None and id(parameter) in used:
                parameter.grad = torch.empty_like(parameter)
        gradients: list[Tensor] = []
        parts: list[Tensor] = []
        for parameter, part in zip(self._small, self._small_parts, strict=True):
            if parameter.grad is not None:
                gradients.append(local(parameter.grad))
                parts.append(part)
        if parts:
            torch._foreach_copy_(gradients, parts)
        for parameter, part in zip(self._large, self._large_parts, strict=True):
            if parameter.grad is None:
                continue
            gradient = local(parameter.grad)
            whole = type(parameter.grad) is Tensor
            if whole and gradient.dtype == part.dtype and gradient.is_contiguous():
                # `set_` and no view: parts of one buffer would count their changes together.
                shared = torch.empty(0, dtype=part.dtype, device=part.device)
                storage = self._flat.untyped_storage()
                shared.set_(storage, part.storage_offset(), part.shape)  # type: ignore[call-overload]
                parameter.grad = shared
            else:
                gradient.copy_(part)

    def _buffer(self) -> Tensor:
        """Return a buffer that nobody else holds a part of."""
        if self._flat is None or storage_uses(self._flat) > self._uses:
            shapes = [local(parameter).shape for parameter in [*self._small, *self._large]]
            sizes = [shape.numel() for shape in shapes]
            length = sum(sizes) + self._flags
            if not self.parameters:
                self._flat = torch.zeros(length)
            else:
                first = local(self.parameters[0])
                dtype = torch.promote_types(first.dtype, torch.float32)
                self._flat = torch.empty(length, dtype=dtype, device=first.device)
            pieces = torch.split(self._flat[: sum(sizes)], sizes) if sizes else ()
            parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
            self._small_parts = parts[: len(self._small)]
            self._large_parts = parts[len(self._small) :]
            del pieces
            self._uses = storage_uses(self._flat)
        return self._flat


def divided(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters into runs of one dtype, with a small first run and a small last one."""
    last: list[nn.Parameter] = []
    remaining = list(parameters)
    edge = min(EDGE, collectives.BUCKET)
    size = 0
    while remaining:
        parameter = remaining[-1]
        size += nbytes(parameter)
        if last and (size > edge or local(parameter).dtype != local(last[0]).dtype):
            break
        last.insert(0, remaining.pop())
    runs: list[list[nn.Parameter]] = []
    size = 0
    for parameter in remaining:
        limit = edge if len(runs) <= 1 else collectives.BUCKET
        if not runs or size >= limit or local(parameter).dtype != local(runs[-1][0]).dtype:
            runs.append([])
            size = 0
        runs[-1].append(parameter)
        size += nbytes(parameter)
    return [*runs, last] if last else runs


def nbytes(parameter: nn.Parameter) -> int:
    """Return the bytes of the part of a parameter on this rank."""
    shard = local(parameter)
    return shard.numel() * shard.element_size()
