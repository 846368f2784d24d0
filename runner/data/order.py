"""Random generators, and the order of samples: one seeded permutation per epoch, dealt to ranks.

Which samples make up optimizer step k depends on the seed and the global batch alone. One process
with microbatches of 8, two ranks with 4 each, and one process with four microbatches of 2 per step
read the same samples in the same step, also in the last, shorter step of an epoch.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

T = TypeVar("T")
Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

_GLOBAL: dict[str, Any] = {"python": random, "numpy": np.random, "cpu": torch.default_generator}
_GPU = "cuda"


def seed_for(purpose: str, seed: int, epoch: int) -> int:
    """Return a seed of 63 bits that depends on a purpose, a seed and an epoch alone."""
    digest = hashlib.blake2b(f"{purpose},{seed},{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(purpose: str, seed: int, epoch: int) -> torch.Generator:
    """Return a CPU generator that is the same on every rank and after a restart."""
    return torch.Generator().manual_seed(seed_for(purpose, seed, epoch))


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch on the host."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_generator(generator: Generator, seed: int) -> None:
    """Seed one generator, of Python, NumPy or torch."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        generator.seed(seed)


def set_epoch(of: Any, epoch: int) -> None:
    """Set the epoch of a data set or sampler that has one."""
    method = getattr(of, "set_epoch", None)
    if callable(method):
        method(epoch)


_HOLDERS = ("sampler", "batch_sampler", "dataset", "transform", "transforms", "target_transform")


def generators(loader: Any, above: str = "") -> dict[str, Generator]:
    """Return the generators of a data loader, its samplers, data set and transforms, by name."""
    attributes = getattr(loader, "__dict__", {})
    if isinstance(loader, list | tuple) and above:
        attributes = {str(number): part for number, part in enumerate(loader)}
    by_name: dict[str, Generator] = {}
    for name, value in attributes.items():
        if isinstance(value, Generator) and not isinstance(value, random.SystemRandom):
            by_name[above + name] = value
        elif above.count(".") < 6 and (
            name in _HOLDERS
            or isinstance(value, DataLoader | Sampler | Dataset)
            or isinstance(loader, list | tuple)
        ):
            by_name |= generators(value, f"{above}{name}.")
    return by_name


class RandomState(dict[str, Any]):
    """State of the global generators of Python, NumPy and torch, the current GPU's, and others."""

    @classmethod
    def now(cls, further: Mapping[str, Generator], with_gpu: bool = True) -> RandomState:
        """Return the states of the global generators, and of ``further`` ones."""
        state = cls({name: _state_of(generator) for name, generator in _all(further).items()})
        if with_gpu and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state[_GPU] = torch.cuda.get_rng_state()
        return state

    def restore(self, further: Mapping[str, Generator]) -> None:
        """Set the global generators, and ``further`` ones, to the states that were read."""
        if not self:
            return
        by_name = _all(further)
        for name in self.keys() & by_name.keys():
            _restore(by_name[name], self[name])
        if _GPU in self and torch.cuda.is_available():
            torch.cuda.set_rng_state(self[_GPU])

    @classmethod
    def only(cls, further: Mapping[str, Generator]) -> RandomState:
        """Return the state of these generators without the global ones."""
        return cls({f"own.{name}": _state_of(generator) for name, generator in further.items()})

    def digest(self) -> int:
        """Return a seed that depends on all these states, apart from states of GPUs."""
        texts = [
            state.numpy().tobytes().hex() if isinstance(state, Tensor) else state
            for name, state in self.state_dict().items()
            if name != _GPU
        ]
        return seed_for("".join(texts), 0, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and texts, which a checkpoint holds without running code."""
        plain: dict[str, Any] = {}
        for name, state in self.items():
            is_tensor = isinstance(state, Tensor)
            plain[name] = state if is_tensor else json.dumps(state, default=np.ndarray.tolist)
        return plain

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RandomState:
        """Return the states that :meth:`state_dict` has made plain."""
        states = cls()
        for name, plain in state.items():
            states[name] = plain if isinstance(plain, Tensor) else json.loads(plain)
        return states


class OwnRandom:
    """Random numbers that one reader of data draws from the global generators of the host.

    The rest of the process finds these generators as if the reader had not drawn.
    """

    def __init__(self, state: RandomState) -> None:
        self.state = state

    @classmethod
    def seeded(cls, seed: int) -> OwnRandom:
        """Return random numbers that begin with a seed."""
        with unchanged({}):
            seed_all(seed)
            return cls(RandomState.now({}, with_gpu=False))

    def during(self, work: Callable[[], T]) -> T:
        """Return ``work()``, which goes on with the random numbers of this reader."""
        outer = RandomState.now({}, with_gpu=False)
        self.state.restore({})
        try:
            return work()
        finally:
            self.state = RandomState.now({}, with_gpu=False)
            outer.restore({})


@contextmanager
def unchanged(further: Mapping[str, Generator], with_gpu: bool = False) -> Iterator[None]:
    """Leave the global generators, and ``further`` ones, as they are before the block."""
    before = RandomState.now(further, with_gpu)
    try:
        yield
    finally:
        before.restore(further)


def _all(further: Mapping[str, Generator]) -> dict[str, Any]:
    return {**_GLOBAL, **{f"own.{name}": generator for name, generator in further.items()}}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    old_numpy = hasattr(generator, "get_state")  # the module numpy.random too
    return generator.get_state(legacy=False) if old_numpy else generator.getstate()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))


class Indices(list[int]):
    """The indices of one rank's part of a microbatch, with their epoch."""

    def __init__(self, indices: Iterable[int] = (), epoch: int = 0) -> None:
        super().__init__(indices)
        self.epoch = epoch


def part_of(samples: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the bounds of a rank's part of a microbatch; the first parts may be one longer."""
    size, longer = divmod(samples, ranks)
    first = rank * size + min(rank, longer)
    return first, first + size + (rank < longer)


class LeftOut(NamedTuple):
    """Samples that are read no more, from a place in a training on."""

    epoch: int
    start: int  # samples of this epoch that were read before, over all ranks
    indices: tuple[int, ...]

    def without(self, order: Tensor, epoch: int) -> Tensor:
        """Return the order of an epoch without them, [samples]."""
        if epoch < self.epoch:
            return order
        start = self.start if epoch == self.epoch else 0
        after = order[start:]
        kept = after[~torch.isin(after, torch.tensor(self.indices))]
        return torch.cat([order[:start], kept])


@dataclass(eq=False, repr=False)
class PartitionedBatches(Sampler[list[int]]):
    """Batch sampler of the indices of one rank's microbatches.

    Attributes:
        left_out: samples that are not read; None if all are.
    """

    length: int
    batch_size: int
    rank: int
    world_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    epoch: int = field(default=0, init=False)
    left_out: LeftOut | None = field(default=None, init=False)
    _start: int = field(default=0, init=False)
    _cached: tuple[int, LeftOut | None, Tensor] | None = field(default=None, init=False)
    last: Sequence[int] = field(default=(), init=False)
    """The indices that were yielded last."""

    def __post_init__(self) -> None:
        if self.length < 0 or self.batch_size < 1:
            sizes = f"length {self.length} must be at least 0, batch_size {self.batch_size}"
            raise ValueError(f"{sizes} at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not one of {self.world_size} ranks")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, by which the order is drawn."""
        self.epoch = epoch

    def set_start(self, microbatch: int) -> None:
        """Skip the microbatches before this one in the next iteration only."""
        if not 0 <= microbatch <= len(self):
            raise ValueError(f"microbatch {microbatch} is not one of 0 to {len(self)}")
        self._start = microbatch

    def __len__(self) -> int:
        """Return the number of microbatches in the whole epoch, regardless of `set_start`."""
        return self._microbatches(self._length())

    def _length(self) -> int:
        """Return the samples of the current epoch."""
        return self.length if self.left_out is None else len(self._permutation())

    def _microbatches(self, samples: int) -> int:
        full, remaining = divmod(samples, self.batch_size * self.world_size)
        return full if self.drop_last or remaining == 0 else full + 1

    def samples_before(self, microbatch: int) -> int:
        """Return the samples of all ranks in the microbatches of the epoch before this one."""
        return min(microbatch * self.batch_size * self.world_size, self._length())

    def __iter__(self) -> Iterator[list[int]]:
        # Read now, not at the first `next`: the caller may set another epoch before that.
        return self._batches(self._permutation(), self._start, self.epoch)

    def parts(self, microbatch: int) -> list[list[int]]:
        """Return the indices that each rank reads in this microbatch of the current epoch."""
        order = self._permutation()
        ranks = range(self.world_size)
        bounds = [self._bounds(microbatch, rank, len(order)) for rank in ranks]
        return [order[first:end].tolist() for first, end in bounds]

    def weightless(self, microbatch: int) -> bool:
        """Return True if this rank has no sample in this microbatch, and reads a stand-in."""
        first, end = self._bounds(microbatch, self.rank, self._length())
        return first == end

    def _batches(self, permutation: Tensor, start: int, epoch: int) -> Iterator[list[int]]:
        self._start = 0  # only now: a loader with workers makes an iterator that it does not use
        samples = len(permutation)
        for microbatch in range(start, self._microbatches(samples)):
            first, end = self._bounds(microbatch, self.rank, samples)
            if first == end:  # a stand-in, the first sample of all ranks
                first = microbatch * self.batch_size * self.world_size
                end = first + 1
            self.last = Indices(permutation[first:end].tolist(), epoch)
            yield self.last

    def _bounds(self, microbatch: int, rank: int, samples: int) -> tuple[int, int]:
        whole = self.batch_size * self.world_size
        start = microbatch * whole
        first, end = part_of(min(whole, samples - start), rank, self.world_size)
        return start + first, start + end

    def _permutation(self) -> Tensor:
        """Return the indices of the current epoch in their order, [samples]."""
        if not self.shuffle and self.left_out is None:
            return torch.arange(self.length)
        cached = self._cached
        if cached is not None and cached[0] == self.epoch and cached[1] is self.left_out:
            return cached[2]
        if self.shuffle:
            generator = generator_for("order", self.seed, self.epoch)
            order = torch.randperm(self.length, generator=generator)
        else:
            order = torch.arange(self.length)
        if self.left_out is not None:
            order = self.left_out.without(order, self.epoch)
        self._cached = self.epoch, self.left_out, order
        return order
