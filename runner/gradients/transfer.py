"""What the host may read without waiting, and how values reach an accelerator and other ranks.

A CPU tensor can be read at no cost. Reading a value of an accelerator makes the host wait for all
work that is queued there, so metrics and decisions stay 0-dimensional tensors on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

SHORT = 8  # numbers of the host that are filled in on a device one by one
Number = float | Tensor
"""A float on a CPU, a 0-dimensional tensor on an accelerator."""


def can_read(device: torch.device) -> bool:
    """Return whether the host may read values on ``device`` without waiting for it."""
    return device.type == "cpu"


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of ``device``."""
    return torch.float32 if device.type == "mps" else torch.float64


def read(value: Tensor) -> Number:
    """Return a 0-dimensional tensor as a float where the host can read it, else as it is."""
    return float(value) if can_read(value.device) else value


def numbers(vector: Tensor) -> Sequence[Number]:
    """Return the values of a vector, each as :func:`read` does."""
    return vector.tolist() if can_read(vector.device) else vector.unbind()


def read_later(value: Tensor) -> Callable[[], float]:
    """Start a copy of a 0-dimensional tensor to the host."""
    if value.device.type != "cuda":
        return value.item
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    copy.copy_(value, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> float:
        done.synchronize()
        return copy.item()

    return wait


def count(mask: Tensor) -> Number:
    """Return how many elements of ``mask`` are true."""
    # In the widest type: a count that is divided by its replicas in float32 is wrong beyond 2^24.
    return read(mask.sum() if can_read(mask.device) else mask.sum(dtype=widest(mask.device)))


def add(values: Sequence[Number]) -> float:
    """Add numbers on the host, one after the other; this waits once for those on an accelerator."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    read = iter(on_device(tensors, tensors[0].device).tolist() if tensors else ())
    return sum((next(read) if isinstance(value, Tensor) else value for value in values), 0.0)


def where(condition: bool | Tensor, if_true: Number, if_false: Number) -> Number:
    """Return ``if_true`` where the condition holds, else ``if_false``; the host does not wait."""
    if not isinstance(condition, Tensor):
        return if_true if condition else if_false
    if not isinstance(if_true, Tensor) and not isinstance(if_false, Tensor):
        if_true = torch.full((), if_true, dtype=widest(condition.device), device=condition.device)
    return torch.where(condition, if_true, if_false)


def ratio(after: Number, before: Number) -> Number:
    """Return ``after`` ÷ ``before``, and 1 for two zeros."""
    if isinstance(before, Tensor):
        return (after / before).nan_to_num(nan=1.0)
    return after / before if before else 1.0


def is_finite(value: Number) -> bool | Tensor:
    """Return whether a number is finite: a bool where the host knows it."""
    return torch.isfinite(value) if isinstance(value, Tensor) else math.isfinite(value)


def on_device(values: Sequence[Number], device: torch.device) -> Tensor:
    """Return one vector of ``values`` on ``device``, in its widest type.

    The host does not wait, unless it copies a long vector of its own numbers: make such a vector
    once, as :meth:`Layout.constant` does.
    """
    dtype = widest(device)
    short = device.type != "cpu" and len(values) <= SHORT
    if short or any(isinstance(value, Tensor) for value in values):
        tensors = []
        for value in values:
            if isinstance(value, Tensor):
                tensors.append(value.to(device, dtype))
            else:
                # A fill is a kernel; a copy from pageable memory would wait for the queue.
                tensors.append(torch.full((), value, dtype=dtype, device=device))
        return torch.stack(tensors)
    return torch.tensor(values, dtype=dtype).to(device)


def start_gather(row: Tensor, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Start to gather a vector of each rank, [ranks, values].

    On a host every rank sends its vector to all others at once: on 8 ranks an all-gather of gloo,
    which goes from rank to rank, takes two to three times as long.
    """
    ranks = dist.get_world_size() if group is None else group.size()
    rows = row.new_empty(ranks * len(row))
    if row.device.type == "cpu":
        work = dist.all_to_all_single(rows, row.repeat(ranks), group=group, async_op=True)
    else:
        work = dist.all_gather_single(rows, row, group=group, async_op=True)

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return rows.view(ranks, -1)

    return wait


def sum_over_ranks(vector: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of the vectors of all ranks.

    Each rank receives about twice the vector, on any number of ranks. All get the same bits: the
    backends add each part in one order and send the result.
    """
    total = vector.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total


def max_over_ranks(vector: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the maximum of the vectors of all ranks, NaN where any rank has NaN."""
    missing = vector.isnan()
    # A backend may lose NaN, depending on the order of the ranks: flags say where it was.
    largest = torch.stack([vector.where(~missing, -math.inf), missing.to(vector.dtype)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest[0].where(largest[1] == 0, math.nan)
