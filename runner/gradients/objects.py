"""Objects that ranks send each other as bytes in tensors.

``torch.distributed.all_gather_object`` needs NumPy, which not every environment has.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the value of each rank of ``group``, which can be pickled; two collectives."""
    data = _pickled(value)
    device = device_of_messages(group)
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(length) for length in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = data
    padded = padded.to(device)
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    return [_unpickled(data[:length]) for data, length in zip(received, lengths, strict=True)]


def broadcast_object(value: Any, group: dist.ProcessGroup, sender: int) -> Any:
    """Return the value of the rank ``sender`` of ``group``; two collectives.

    Args:
        value: an object that can be pickled; of other ranks it is ignored.
    """
    is_sender = group.rank() == sender
    device = device_of_messages(group)
    data = _pickled(value if is_sender else None)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, group=group, group_src=sender)
    data = (
        data.to(device) if is_sender else torch.empty(int(size), dtype=torch.uint8, device=device)
    )
    dist.broadcast(data, group=group, group_src=sender)
    return value if is_sender else _unpickled(data)


def device_of_messages(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors every rank of ``group`` can send: the host if it can."""
    backends = str(dist.get_backend_config(group))
    device_types = [pair.partition(":")[0] for pair in backends.split(",")]
    if "cpu" in device_types:
        return torch.device("cpu")
    current = torch.accelerator.current_accelerator()
    assert current is not None
    return torch.device(current.type, torch.accelerator.current_device_index())


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    content = bytearray(data.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(data)
    return pickle.loads(content)
