"""The order of samples: one seeded permutation per epoch, partitioned over ranks and microbatches.

Which samples make up optimizer step k depends on the seed and the global batch alone. One process
with microbatches of 8, two ranks with 4 each, and one process with four microbatches of 2 per step
read the same samples in the same step, also in the last, shorter step of an epoch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import Sampler

from runner.data.random_state import generator_for


class Indices(list[int]):
    """The indices of one rank's part of a microbatch, with their epoch."""

    def __init__(self, indices: Iterable[int] = (), epoch: int = 0) -> None:
        super().__init__(indices)
        self.epoch = epoch


class EmptyPart(Indices):
    """The part of a rank for which a microbatch has no sample."""

    weightless = True


@dataclass(eq=False, repr=False)
class PartitionedBatches(Sampler[list[int]]):
    """Batch sampler of the indices of one rank's microbatches."""

    length: int
    batch_size: int
    rank: int
    world_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    epoch: int = field(default=0, init=False)
    _start: int = field(default=0, init=False)
    _cached: tuple[int, Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.length < 0 or self.batch_size < 1 or self.world_size < 1:
            raise ValueError(
                f"length {self.length} must be at least 0, batch_size {self.batch_size} and "
                f"world_size {self.world_size} at least 1"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not one of 0 to {self.world_size - 1}")

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def set_start(self, microbatch: int) -> None:
        """Skip the microbatches before this one in the next iteration only."""
        if not 0 <= microbatch <= len(self):
            raise ValueError(f"microbatch {microbatch} is not one of 0 to {len(self)}")
        self._start = microbatch

    def __len__(self) -> int:
        """Return the number of microbatches in a whole epoch, regardless of `set_start`."""
        whole, rest = divmod(self.length, self.batch_size * self.world_size)
        return whole if self.drop_last or rest == 0 else whole + 1

    def __iter__(self) -> Iterator[list[int]]:
        # Read now, not at the first `next`: the caller may set another epoch before that.
        return self._batches(self._permutation(), self._start, self.epoch)

    def parts(self, microbatch: int) -> list[list[int]]:
        """Return the indices that each rank reads in this microbatch of the current epoch."""
        permutation = self._permutation()
        return [
            permutation[slice(*self._bounds(microbatch, rank))].tolist()
            for rank in range(self.world_size)
        ]

    def weightless(self, microbatch: int) -> bool:
        """Return True if this rank has no sample in this microbatch and gets an `EmptyPart`."""
        first, end = self._bounds(microbatch, self.rank)
        return first == end

    def _batches(self, permutation: Tensor, start: int, epoch: int) -> Iterator[list[int]]:
        self._start = 0  # only now: a loader with workers makes an iterator that it does not use
        for microbatch in range(start, len(self)):
            first, end = self._bounds(microbatch, self.rank)
            if first < end:
                yield Indices(permutation[first:end].tolist(), epoch)
            else:
                slice_start = microbatch * self.batch_size * self.world_size
                yield EmptyPart([int(permutation[slice_start])], epoch)

    def _bounds(self, microbatch: int, rank: int) -> tuple[int, int]:
        if not 0 <= microbatch < len(self):
            raise IndexError(f"microbatch {microbatch} is not one of 0 to {len(self) - 1}")
        whole = self.batch_size * self.world_size
        start = microbatch * whole
        size, longer = divmod(min(whole, self.length - start), self.world_size)
        first = start + rank * size + min(rank, longer)
        return first, first + size + (rank < longer)

    def _permutation(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        if self._cached is None or self._cached[0] != self.epoch:
            generator = generator_for("order", self.seed, self.epoch)
            self._cached = self.epoch, torch.randperm(self.length, generator=generator)
        return self._cached[1]
