"""Some elements of each of many tensors, worked on together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

_SAMPLE = 128  # elements of a tensor that ranks compare


class Samples:
    """Some elements of each of many tensors, the same ones on every rank, in float64 on the host.

    One operation works on all of them, because models have many small tensors.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.count = len(tensors)
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, tensor in enumerate(tensors):
            if tensor is not None and not tensor.is_meta and tensor.numel():
                flat = tensor.reshape(-1)
                sample = flat[:: max(1, flat.numel() // _SAMPLE)]
                by_device.setdefault(sample.device, []).append((number, sample))
        owners: list[Tensor] = []
        places: list[Tensor] = []
        values: list[Tensor] = []
        for rows in by_device.values():
            sizes = torch.tensor([len(sample) for _, sample in rows])
            starts = sizes.cumsum(0) - sizes
            values.append(torch.cat([sample for _, sample in rows]).double().cpu())
            owners.append(torch.tensor([number for number, _ in rows]).repeat_interleave(sizes))
            places.append(torch.arange(len(values[-1])) - starts.repeat_interleave(sizes))
        self.values = torch.cat(values) if values else torch.zeros(0, dtype=torch.float64)
        self.owners = torch.cat(owners) if owners else torch.zeros(0, dtype=torch.int64)
        self.places = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum over the sample of each tensor of ``values``, one for each element."""
        total = torch.zeros(self.count, dtype=torch.float64)
        return total.index_add_(0, self.owners, values)

    def largest(self) -> Tensor:
        """Return the largest absolute element of the sample of each tensor."""
        total = torch.zeros(self.count, dtype=torch.float64)
        return total.scatter_reduce_(0, self.owners, self.values.abs(), "amax")

    def projections(self) -> list[list[float]]:
        """Return norm and two projections of each sample: replicas have equal ones."""
        angles = self.places.double()
        rows = [
            self.sums(self.values.square()).sqrt(),
            self.sums(self.values * angles.cos()),
            self.sums(self.values * angles.sin()),
        ]
        projections: list[list[float]] = torch.stack(rows, dim=1).tolist()
        return projections


def to_host(vectors: Sequence[Tensor]) -> list[float]:
    """Return the elements of vectors as numbers; the host waits once for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for vector in vectors:
        by_device.setdefault(vector.device, []).append(vector)
    numbers: dict[torch.device, Iterator[float]] = {}
    for device, of_device in by_device.items():
        numbers[device] = iter(torch.cat(of_device).tolist())
    elements: list[float] = []
    for vector in vectors:
        elements += islice(numbers[vector.device], vector.numel())
    return elements
