"""Random samples that depend on seed, epoch and index alone, whoever reads them.

Seeding all generators takes longer than reading a small sample. So a batch is read as its data set
reads it, and only if that draws random numbers, it is read again, one sample after the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

from runner.config.notation import first_few
from runner.data.order import (
    Generator,
    Indices,
    RandomState,
    generators,
    seed_all,
    seed_for,
    seed_generator,
    set_epoch,
)

_NUMPY: Any = np.random  # its type hints leave out get_bit_generator and set_bit_generator


def draws_nothing(dataset: Any) -> bool:
    """Return True if a data set is known to draw no random number when a sample is read.

    A class says so by its attribute ``draws_nothing``; then its batches cost nothing extra.
    """
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    in_memory = type(dataset) in (TensorDataset, list, tuple)
    return in_memory or getattr(dataset, "draws_nothing", False) is True


def is_share(dataset: Any) -> bool:
    """Return True if a data set is some samples of another one, which are read as that reads."""
    kind = type(dataset)
    return (
        isinstance(dataset, Subset)
        and kind.__getitem__ is Subset.__getitem__
        and kind.__getitems__ is Subset.__getitems__
    )


def reads_batches(dataset: Any) -> bool:
    """Return True if a data set reads several samples at once; a share reads as the whole does."""
    if is_share(dataset):
        return reads_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def origin(dataset: Any, indices: Sequence[int]) -> tuple[Any, Sequence[int]]:
    """Return the data set that a share is taken of, and the indices of these samples there."""
    while True:
        if isinstance(dataset, SeededSamples):
            dataset = dataset.dataset
        elif is_share(dataset) and all(index < len(dataset) for index in indices):
            indices = [int(dataset.indices[index]) for index in indices]
            dataset = dataset.dataset
        else:
            return dataset, indices


def place_of(dataset: Any, indices: Sequence[int] = ()) -> str:
    """Return ``data set Images, sample 3``, or ``..., samples 3, 5, 6, 8 and 7 more``.

    Of a share of a data set, that are the indices in the whole one.
    """
    dataset, indices = origin(dataset, indices)
    name = f"data set {type(dataset).__name__}"
    if not indices:
        return name
    numbers = first_few([str(index) for index in indices], most=4)
    return f"{name}, sample{'s' if len(indices) > 1 else ''} {numbers}"


def is_in_memory(dataset: Any) -> bool:
    """Return True if samples are tensors in memory, or in a list: reading one cannot fail."""
    if is_share(dataset):
        return is_in_memory(dataset.dataset)
    tensors = isinstance(dataset, TensorDataset) and draws_nothing(dataset)
    return tensors or type(dataset) in (list, tuple)


@dataclass(eq=False, repr=False)
class SeededSamples(Dataset[Any]):
    """A data set whose samples depend on seed, epoch and index alone.

    If it draws random numbers, the global generators of the host, and the generators that the data
    set holds, are seeded for each sample. The training process finds them as they were, except that
    NumPy forgets the second of a pair of normal numbers.
    """

    dataset: Dataset[Any]
    seed: int
    epoch: int = 0
    reading: Sequence[int] = ()
    """Indices of the samples that are read now, or were read last."""
    _draws: bool = field(default=False, init=False)
    _scratch: np.random.BitGenerator | None = field(default=None, init=False)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the data set."""
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; workers that run already get it with the indices of a batch."""
        self.epoch = epoch
        set_epoch(self.dataset, epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if draws_nothing(self.dataset):
            return self.dataset[index]
        dataset_generators = generators(self.dataset)
        with self._apart(dataset_generators):
            return self._sample(index, dataset_generators)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        try:
            return self._read(indices)
        except Exception as error:
            error.add_note(f"while {place_of(self.dataset, self.reading)} was read")
            raise

    def _read(self, indices: Sequence[int]) -> Any:
        if isinstance(indices, Indices) and indices.epoch != self.epoch:
            self.set_epoch(indices.epoch)
        if draws_nothing(self.dataset):
            return self._batch(indices)
        dataset_generators = generators(self.dataset)
        with self._apart(dataset_generators):
            if not self._draws:
                batch = self._batch_unless_drawn(indices, dataset_generators)
            if self._draws:
                batch = [self._sample(index, dataset_generators) for index in indices]
                self.reading = indices
        if get_worker_info() is not None:  # the function that collates may draw in a worker
            seed_all(self._seed_of(f"batch of sample {indices[0]}"))
        return batch

    def _batch(self, indices: Sequence[int]) -> Any:
        self.reading = indices
        if reads_batches(self.dataset):
            return self.dataset.__getitems__(indices)  # type: ignore[attr-defined]
        samples = []
        for index in indices:
            self.reading = [index]
            samples.append(self.dataset[index])
        self.reading = indices
        return samples

    def _batch_unless_drawn(
        self, indices: Sequence[int], dataset_generators: dict[str, Generator]
    ) -> Any:
        """Read a batch at once, and note whether that draws a random number."""
        seed = self._seed_of(f"batch of sample {indices[0]}")
        seed_all(seed)
        undrawn = _next_numbers()
        before = RandomState.only(dataset_generators).digest()
        seed_all(seed)
        batch = self._batch(indices)
        self._draws = (
            _next_numbers() != undrawn or RandomState.only(dataset_generators).digest() != before
        )
        return batch

    def _sample(self, index: int, dataset_generators: dict[str, Generator]) -> Any:
        """Read a sample alone, with all generators seeded for it."""
        self.reading = [index]
        seed = self._seed_of(f"sample {index} in a worker")
        read = getattr(self.dataset, "__getitems__", None)
        if callable(read):
            _seed(seed, dataset_generators)
            samples = read([index])
            if isinstance(samples, list):
                return samples[0]
        _seed(
            seed, dataset_generators
        )  # what it returned is a batch, which cannot be put together with others
        return self.dataset[index]

    def _seed_of(self, purpose: str) -> int:
        return seed_for(purpose, self.seed, self.epoch)

    @contextmanager
    def _apart(self, dataset_generators: dict[str, Generator]) -> Iterator[None]:
        """Leave the generators of the training process as they are."""
        if get_worker_info() is not None:
            yield
            return
        # Reading or setting the state of NumPy's generator takes longer than all others together.
        numpy = _NUMPY.get_bit_generator()
        if self._scratch is None or self._scratch is numpy:
            self._scratch = np.random.MT19937(0)
        python = random.getstate()
        torch_cpu = torch.default_generator.get_state()
        states = RandomState.only(dataset_generators)
        _NUMPY.set_bit_generator(self._scratch)
        try:
            yield
        finally:
            _NUMPY.set_bit_generator(numpy)
            random.setstate(python)
            torch.default_generator.set_state(torch_cpu)
            states.restore(dataset_generators)


def _seed(seed: int, dataset_generators: dict[str, Generator]) -> None:
    seed_all(seed)
    for generator in dataset_generators.values():
        seed_generator(generator, seed)


def _next_numbers() -> tuple[int, int, int]:
    """Return a number of each global generator of the host."""
    cpu = torch.empty((), dtype=torch.int64).random_()
    return random.getrandbits(64), _NUMPY.get_bit_generator().random_raw(), int(cpu)
