"""What the host may read without waiting, and how values reach an accelerator.

A CPU tensor can be read at no cost. Reading a value of an accelerator makes the host wait for all
work that is queued there, so metrics and decisions stay 0-dimensional tensors on it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Number = float | Tensor
"""A float on a CPU, a 0-dimensional tensor on an accelerator."""


def can_read(device: torch.device) -> bool:
    """Return whether the host may read values on ``device`` without waiting for it.

    Everything that keeps metrics on an accelerator asks this function, so a test that replaces it
    runs the accelerator's code on CPU tensors.
    """
    return device.type == "cpu"


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of ``device``."""
    return torch.float32 if device.type == "mps" else torch.float64


def read(value: Tensor) -> Number:
    """Return a 0-dimensional tensor as a float where the host can read it, else as it is."""
    return float(value) if can_read(value.device) else value


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
    """Return how many elements of ``mask`` are true: a float where the host can read it.

    In the widest type: a count that is divided by its replicas in float32 is wrong beyond 2^24.
    """
    return read(mask.sum() if can_read(mask.device) else mask.sum(dtype=widest(mask.device)))


def add(values: Sequence[Number]) -> float:
    """Add numbers on the host, one after the other; this waits once for those on an accelerator."""
    away = [value for value in values if isinstance(value, Tensor)]
    read = iter(on_device(away, away[0].device).tolist() if away else ())
    here = (next(read) if isinstance(value, Tensor) else value for value in values)
    return functools.reduce(operator.add, here, 0.0)


def on_device(values: Sequence[Number], device: torch.device) -> Tensor:
    """Return one vector of ``values`` on ``device``, in its widest type, without waiting for it."""
    dtype = widest(device)
    if any(isinstance(value, Tensor) for value in values):
        # A fill is a kernel; a copy of one number from pageable memory would wait for the queue.
        return torch.stack(
            [
                value.to(device, dtype)
                if isinstance(value, Tensor)
                else torch.full((), value, dtype=dtype, device=device)
                for value in values
            ]
        )
    vector = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        return vector.pin_memory().to(device, non_blocking=True)
    return vector.to(device)
