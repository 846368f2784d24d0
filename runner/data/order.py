"""The order of samples: one seeded permutation an epoch, dealt to ranks and microbatches.

Which samples make up optimizer step k depends on the seed and the global batch alone. One process
with microbatches of 8, two ranks with 4 each, and one process with four microbatches of 2 to a
step read the same samples in the same step, the last, shorter one of an epoch included.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from runner.data.seeding import generator_for


class EmptyPart(list[int]):
    """A rank's part of a microbatch that had no sample left for this rank.

    It holds one index, so that forward and backward (and with them the collectives that other
    ranks wait in) still run; whoever trains on it gives it weight zero.
    """

    weightless = True


class PartitionedBatches(Sampler[list[int]]):
    """Batch sampler: the indices of one rank's microbatches.

    With R ranks and b samples a microbatch of one rank, microbatch m covers
    `permutation[m*R*b : (m+1)*R*b]`. Of its k samples rank r gets a contiguous part of k//R, and
    one more when r < k % R: b for every rank while k = R*b, and as even as can be in the last,
    shorter microbatch.

    `drop_last` drops that shorter microbatch. How much it drops depends on R*b, so the last step of
    an epoch is then no longer the same for every way to split a global batch.

    A `DataLoader` copies the indices it is handed on their way to worker processes, and `EmptyPart`
    with them: ask `weightless(m)` rather than looking at a batch.

    Args:
        length: samples in the data set, N.
        batch_size: samples in one rank's microbatch, b.
        rank: this rank among the data-parallel ones.
        world_size: number of data-parallel ranks, R.
        shuffle: a permutation for each epoch; otherwise the samples in their order.
        drop_last: leave out the microbatch that holds fewer than R*b samples.
        seed: of the permutations.

    Raises:
        ValueError: for a negative length, a size below one, or a rank outside the ranks.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        rank: int,
        world_size: int,
        shuffle: bool,
        drop_last: bool,
        seed: int,
    ) -> None:
        if length < 0 or batch_size < 1 or world_size < 1:
            raise ValueError(
                f"length {length} must be at least 0, batch_size {batch_size} and "
                f"world_size {world_size} at least 1"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of 0 to {world_size - 1}")
        self.length = length
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = 0
        self._start = 0
        self._cached: tuple[int, Tensor] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Take the permutation of this epoch from the next iteration on."""
        self.epoch = epoch

    def set_start(self, microbatch: int) -> None:
        """Skip the microbatches before this one in the next iteration, and in that one only.

        Raises:
            ValueError: when the epoch has fewer microbatches.
        """
        if not 0 <= microbatch <= len(self):
            raise ValueError(f"microbatch {microbatch} is not one of 0 to {len(self)}")
        self._start = microbatch

    def __len__(self) -> int:
        """Microbatches in a whole epoch, whatever `set_start` said."""
        whole, rest = divmod(self.length, self.batch_size * self.world_size)
        return whole if self.drop_last or rest == 0 else whole + 1

    def __iter__(self) -> Iterator[list[int]]:
        # Taken now, not at the first `next`: the caller may go on to prepare another epoch.
        start, self._start = self._start, 0
        return self._batches(self._permutation(), start)

    def parts(self, microbatch: int) -> list[list[int]]:
        """The indices that each rank reads in this microbatch of the current epoch, by rank.

        Unlike iteration, this leaves the part of a rank that has no sample empty.
        """
        permutation = self._permutation()
        return [
            permutation[slice(*self._bounds(microbatch, rank))].tolist()
            for rank in range(self.world_size)
        ]

    def weightless(self, microbatch: int) -> bool:
        """Whether this rank has no sample of this microbatch and gets an `EmptyPart` instead.

        `microbatch` counts from the start of the epoch, also after `set_start`.
        """
        first, end = self._bounds(microbatch, self.rank)
        return first == end

    def _batches(self, permutation: Tensor, start: int) -> Iterator[list[int]]:
        for microbatch in range(start, len(self)):
            first, end = self._bounds(microbatch, self.rank)
            if first < end:
                yield permutation[first:end].tolist()
            else:
                slice_start = microbatch * self.batch_size * self.world_size
                yield EmptyPart([int(permutation[slice_start])])

    def _bounds(self, microbatch: int, rank: int) -> tuple[int, int]:
        """First and end position, in the permutation, of a rank's part of a microbatch."""
        if not 0 <= microbatch < len(self):
            raise IndexError(f"microbatch {microbatch} is not one of 0 to {len(self) - 1}")
        whole = self.batch_size * self.world_size
        start = microbatch * whole
        size, longer = divmod(min(whole, self.length - start), self.world_size)
        first = start + rank * size + min(rank, longer)
        return first, first + size + (rank < longer)

    def _permutation(self) -> Tensor:
        """The order of the current epoch, int64 [N]."""
        if self._cached is None or self._cached[0] != self.epoch:
            self._cached = (self.epoch, self._draw())
        return self._cached[1]

    def _draw(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=generator_for("order", self.seed, self.epoch))
