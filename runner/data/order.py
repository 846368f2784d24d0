"""Random generators, and the order of samples: one seeded permutation per epoch, dealt to ranks.

Which samples make up optimizer step k depends on the seed and the global batch alone. One process
with microbatches of 8, two ranks with 4 each, and one process with four microbatches of 2 per step
read the same samples in the same step, also in the last, shorter step of an epoch.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

_HOLDERS = ("sampler", "batch_sampler", "dataset")
"""Attributes of a loader, and of what it holds, whose generators are looked for."""


def seed_for(purpose: str, seed: int, epoch: int) -> int:
    """Return a seed of 63 bits that depends on a purpose, a seed and an epoch alone."""
    digest = hashlib.blake2b(f"{purpose},{seed},{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(purpose: str, seed: int, epoch: int) -> torch.Generator:
    """Return a CPU generator that is the same on every rank and after a restart."""
    return torch.Generator().manual_seed(seed_for(purpose, seed, epoch))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def generators(loader: Any, above: str = "") -> dict[str, Generator]:
    """Return the generators of a data loader, its samplers and its data set, by dotted name."""
    found: dict[str, Generator] = {}
    for name, value in getattr(loader, "__dict__", {}).items():
        if isinstance(value, Generator):
            found[above + name] = value
        elif above.count(".") < 4 and (
            name in _HOLDERS or isinstance(value, DataLoader | Sampler | Dataset)
        ):
            found |= generators(value, f"{above}{name}.")
    return found


class RandomState(NamedTuple):
    """State of the global generators of Python, NumPy and torch, and of the current GPU's."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: Tensor | None = None
    own: Mapping[str, Any] = {}

    @classmethod
    def now(cls, own: Mapping[str, Generator], with_gpu: bool = True) -> RandomState:
        uses_gpu = with_gpu and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            random.getstate(),
            np.random.get_state(legacy=False),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if uses_gpu else None,
            {name: _state_of(generator) for name, generator in own.items()},
        )

    def restore(self, own: Mapping[str, Generator]) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        for name in self.own.keys() & own.keys():
            _restore(own[name], self.own[name])

    def state_dict(self) -> dict[str, Any]:
        state = self._asdict()
        state["python"] = json.dumps(self.python)
        state["numpy"] = json.dumps(self.numpy, default=np.ndarray.tolist)
        return {key: value for key, value in state.items() if value is not None}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RandomState:
        version, words, gauss = json.loads(state["python"])
        python = (version, tuple(words), gauss)
        return cls(**{**state, "python": python, "numpy": json.loads(state["numpy"])})


def _state_of(generator: Generator) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            state: Any = generator.bit_generator.state
        case np.random.RandomState():
            state = generator.get_state(legacy=False)
        case _:
            state = generator.getstate()
    return json.dumps(state, default=np.ndarray.tolist)


def _restore(generator: Generator, state: Any) -> None:
    match generator:
        case torch.Generator():
            generator.set_state(state)
        case np.random.Generator():
            generator.bit_generator.state = json.loads(state)
        case np.random.RandomState():
            generator.set_state(json.loads(state))
        case _:
            version, words, gauss = json.loads(state)
            generator.setstate((version, tuple(words), gauss))


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
