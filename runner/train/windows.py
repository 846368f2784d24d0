"""The microbatches of a data loader, grouped by optimizer step, from any position in an epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader

from runner.data.order import PartitionedBatches
from runner.data.workers import WorkerLoader
from runner.train.random_state import RandomState, generators

EXACT = ("torch.utils.data.sampler", "torch.utils.data.distributed")
"""Modules whose samplers know exactly how many samples they yield. A user's own may estimate it."""


class Window(NamedTuple):
    """The microbatches of one optimizer step.

    Attributes:
        first: index of its first microbatch in the epoch.
        batches: up to ``accumulation.steps`` microbatches; fewer at the end of an epoch.
        last: whether the epoch ends with it.
    """

    first: int
    batches: list[Any]
    last: bool


class Windows:
    """Reads a data loader in windows.

    Reading can start at any microbatch of an epoch: samples and random numbers are then those of an
    epoch that was read from its beginning. Random transforms in worker processes of a loader that
    no plugin made continue exactly only if they depend on nothing but epoch and sample.

    Args:
        loader: yields microbatches of this rank. If its batch sampler is a
            :class:`~runner.data.order.PartitionedBatches`, earlier microbatches are skipped;
            those of any other loader are read and dropped.
        steps: microbatches of one window.
    """

    def __init__(self, loader: Iterable[Any], steps: int) -> None:
        self.loader = loader
        self._steps = steps
        self._order = getattr(loader, "batch_sampler", None)
        self._generators = generators(loader)
        self._random: dict[str, RandomState] = {}

    @property
    def samples(self) -> int | None:
        """Number of samples of a microbatch over all ranks; None if the loader does not tell."""
        order = self._order
        if not isinstance(order, PartitionedBatches):
            return None
        return order.batch_size * order.world_size

    def weightless(self, microbatch: int) -> bool:
        """Return whether this rank has no sample of a microbatch and reads a stand-in."""
        return isinstance(self._order, PartitionedBatches) and self._order.weightless(microbatch)

    def indices(self, epoch: int, microbatch: int) -> list[list[int]] | None:
        """Return the indices of the samples that each data-parallel rank reads in a microbatch.

        Args:
            epoch: number of the epoch.
            microbatch: index of the microbatch in the epoch.

        Returns:
            The indices by data-parallel rank; None if the loader does not tell them.
        """
        if not isinstance(self._order, PartitionedBatches):
            return None
        order = copy.copy(self._order)
        order.set_epoch(epoch)
        return order.parts(microbatch)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Window]:
        """Read one epoch.

        Args:
            epoch: number of the epoch, for the ``set_epoch`` functions of the loader's parts.
            first: index of the first microbatch to read; a window has to begin with it.
        """
        for part in (
            self._order,
            *(getattr(self.loader, of, None) for of in ("sampler", "dataset")),
        ):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        now = RandomState.now(self._generators)
        if first:
            # When an epoch begins, a sampler may draw its order, and a loader its workers' seeds.
            self._random["epoch"].restore(self._generators)
        else:
            self._random = {"epoch": now}
        if first and isinstance(self._order, PartitionedBatches):
            self._order.set_start(first)
        batches = iter(self.loader)
        if not isinstance(self._order, PartitionedBatches):
            next(islice(batches, first, first), None)
        length = self._length()
        if length is None:
            yield from self._one_ahead(batches, first, now)
            return
        if first:
            now.restore(self._generators)
        for at in range(first, length, self._steps):
            window = list(islice(batches, self._steps))
            yield Window(at, window, last=at + self._steps >= length)

    def _one_ahead(self, batches: Iterator[Any], first: int, now: RandomState) -> Iterator[Window]:
        """Read windows from a loader of unknown length: one ahead, to know which is the last."""
        if first:
            self._random["ahead"].restore(self._generators)
        upcoming = list(islice(batches, self._steps))
        if first:
            now.restore(self._generators)
        while upcoming:
            self._random["ahead"] = RandomState.now(self._generators)
            window, upcoming = upcoming, list(islice(batches, self._steps))
            yield Window(first, window, last=not upcoming)
            first += len(window)

    def state_dict(self) -> dict[str, Any]:
        """Return the random states of this process: now, and those to read an epoch again."""
        states = {**self._random, "now": RandomState.now(self._generators)}
        return {name: state.state_dict() for name, state in states.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the random states; :meth:`epoch` then continues where the state was taken."""
        self._random = {name: RandomState.of(each) for name, each in state.items()}
        self._random.pop("now").restore(self._generators)

    def _length(self) -> int | None:
        """Return the number of microbatches of an epoch, None where it is not known exactly."""
        order = self._order
        if type(self.loader) in (DataLoader, WorkerLoader) and (
            isinstance(order, PartitionedBatches)
            or (type(order) is BatchSampler and type(order.sampler).__module__ in EXACT)
        ):
            return len(order)
        return None
