"""The microbatches of a data loader, grouped by optimizer step, from any position in an epoch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader

from runner.booster import Plugin
from runner.data.order import PartitionedBatches
from runner.data.random_state import RandomState, generators
from runner.data.stream import StreamLoader, has_state
from runner.data.workers import WorkerLoader

log = logging.getLogger(__name__)

EXACT = ("torch.utils.data.sampler", "torch.utils.data.distributed")
"""Modules whose samplers know exactly how many samples they yield. A user's own may estimate it."""


class Window(NamedTuple):
    """The microbatches of one optimizer step."""

    first: int
    batches: list[Any]
    last: bool


class Windows:
    """Reads a data loader in windows."""

    def __init__(self, loader: Iterable[Any], steps: int) -> None:
        self.loader = loader
        self._steps = steps
        self._order = getattr(loader, "batch_sampler", None)
        self._stream = loader if isinstance(loader, StreamLoader) else None
        self._skips = self._stream is not None or isinstance(self._order, PartitionedBatches)
        self._stateful: Any = loader if has_state(loader) and not self._skips else None
        self._generators = generators(loader)
        self._random: dict[str, RandomState] = {}
        self._position: dict[str, Any] | None = None

    @property
    def samples(self) -> int | None:
        """Number of samples of a microbatch over all ranks; None if the loader does not tell."""
        order = self._order
        if self._stream is not None:
            return self._stream.microbatch
        if not isinstance(order, PartitionedBatches):
            return None
        return order.batch_size * order.world_size

    @property
    def uneven(self) -> bool:
        """Whether the data may end earlier on this rank than on others, which it waits for then."""
        return self._stream is not None and self._stream.uneven

    def weightless(self, microbatch: int) -> bool:
        """Return whether this rank has no sample of a microbatch and reads a stand-in."""
        return has_no_sample(self.loader, microbatch)

    def indices(self, epoch: int, microbatch: int) -> list[list[int]] | None:
        """Return the indices of the samples that each data-parallel rank reads in a microbatch."""
        if not isinstance(self._order, PartitionedBatches):
            return None
        order = copy.copy(self._order)
        order.set_epoch(epoch)
        return order.parts(microbatch)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Window]:
        """Read one epoch."""
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
        if first and self._stream is not None:
            assert self._position is not None
            self._stream.set_start(first, self._position)
            if not any("state" in of for of in self._position["workers"].values()):
                log.info(
                    "the stream has no state_dict and load_state_dict: the first %d microbatches "
                    "of epoch %d are read again and left out",
                    first,
                    epoch,
                )
        continues = first and self._stateful is not None and self._position is not None
        if continues:
            self._stateful.load_state_dict(self._position)
        batches = iter(self.loader)
        if not (continues or self._skips):
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
        while upcoming or self.uneven:
            self._random["ahead"] = RandomState.now(self._generators)
            if self._stateful is not None:
                self._position = copy.deepcopy(self._stateful.state_dict())
            window, upcoming = upcoming, list(islice(batches, self._steps))
            end = first + len(window)
            if self._stream is not None:
                self._position = self._stream.position(end)
            if self.uneven:
                end = first + self._steps
                at = range(first + len(window), end)
                window = [*window, *map(self._stand_in, at)]
            yield Window(first, window, last=not upcoming)
            first = end

    def _stand_in(self, microbatch: int) -> Any:
        assert self._stream is not None
        return self._stream.stand_in(microbatch)

    def state_dict(self) -> dict[str, Any]:
        """Return the random states of this process: now, and those to read an epoch again."""
        states = {**self._random, "now": RandomState.now(self._generators)}
        saved: dict[str, Any] = {name: state.state_dict() for name, state in states.items()}
        return saved if self._position is None else {**saved, "stream": self._position}

    def require(self, state: Mapping[str, Any]) -> None:
        """Check a state that :meth:`load_state_dict` is given."""
        if self._stream is not None and "stream" in state:
            self._stream.require(state["stream"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the random states; :meth:`epoch` then continues where the state was taken."""
        self._position = state.get("stream")
        self._random = {
            name: RandomState.of(each) for name, each in state.items() if name != "stream"
        }
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


def has_no_sample(loader: Any, microbatch: int) -> bool:
    """Return whether this rank has no sample of a microbatch that it has read from a loader."""
    if isinstance(loader, StreamLoader):
        return loader.weightless(microbatch)
    order = getattr(loader, "batch_sampler", None)
    return isinstance(order, PartitionedBatches) and order.weightless(microbatch)


def held_out(loader: Any, plugin: Plugin) -> Iterator[tuple[bool, Any]]:
    """Read held-out data once; all ranks read the same number of microbatches."""
    batches, uneven = iter(loader), isinstance(loader, StreamLoader) and loader.uneven
    for number in count():
        ended: list[Any] = []
        batch = next(batches, ended)
        if uneven:
            reading = plugin.sum_over_ranks([float(batch is not ended)])[0]
            if reading and batch is ended:
                batch = loader.stand_in(number)
        if batch is ended:
            return
        yield has_no_sample(loader, number), batch
