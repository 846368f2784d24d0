"""What the host may read without waiting, and how values reach an accelerator and other ranks.

A number of a step, such as a norm or a coefficient, is a 0-dimensional tensor on the device of the
gradients, in its widest type. A CPU tensor can be read at no cost. Reading a value of an
accelerator makes the host wait for all work that is queued there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

SHORT = 8  # numbers of the host that are filled in on a device one by one


def can_read(device: torch.device) -> bool:
    """Return whether the host may read values on ``device`` without waiting for it."""
    return device.type == "cpu"


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of ``device``."""
    return torch.float32 if device.type == "mps" else torch.float64


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


def to_host(vectors: Sequence[Tensor]) -> list[list[float]]:
    """Return the numbers of vectors of one type, in one transfer; it waits for an accelerator."""
    if all(can_read(vector.device) for vector in vectors):
        return [vector.tolist() for vector in vectors]
    values = torch.cat(list(vectors)).tolist()
    lists = []
    for vector in vectors:
        lists.append(values[: len(vector)])
        values = values[len(vector) :]
    return lists


def number(value: float, device: torch.device) -> Tensor:
    """Return a 0-dimensional tensor, in the widest type of ``device``; the host does not wait."""
    return torch.full((), value, dtype=widest(device), device=device)


def on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """Return one vector of numbers of the host on ``device``, in its widest type.

    The host waits for an accelerator if it copies a long vector: make such a vector once, as
    :meth:`Layout.constant` does.
    """
    if device.type != "cpu" and 0 < len(values) <= SHORT:
        # A fill is a kernel; a copy from pageable memory would wait for the queue.
        return torch.stack([number(value, device) for value in values])
    return torch.tensor(values, dtype=widest(device)).to(device)


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
