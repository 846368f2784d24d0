"""Windows of microbatches, read from a loader from any position in an epoch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from runner.booster import Plugin
from runner.data.order import (
    LeftOut,
    OwnRandom,
    PartitionedBatches,
    RandomState,
    generators,
    set_epoch,
)
from runner.data.samples import origin
from runner.data.stream import StreamLoader
from runner.data.workers import WorkerLoader, has_persistent_workers, start_workers_anew
from runner.train.progress import Progress

_logger = logging.getLogger(__name__)
T = TypeVar("T")

OTHER_SAMPLES = (
    "the stream does not yield the samples that followed when the checkpoint was saved, so the "
    "steps differ from a run that was never stopped"
)

NO_HELD_OUT = (
    "some ranks have no batch of held-out data: give each rank at least one, use "
    "plugin.prepare_dataloader, or use fewer ranks"
)

# What the random numbers of an epoch's order and samples are drawn from.
WITH_TRAINING = "with the training"
ALONE = "alone"

# Modules whose samplers know exactly how many samples they yield. A user's own may estimate it.
EXACT = ("torch.utils.data.sampler", "torch.utils.data.distributed")


class Window(NamedTuple):
    """The microbatches of one optimizer step on this rank; ``first``: index of the first one."""

    first: int
    batches: list[Any]
    last: bool


class Windows:
    """Reads a loader in windows of microbatches, from any position in an epoch.

    How an epoch is continued depends on the loader. One of ``prepare_dataloader`` is set to the
    position. Another is read again up to it. If its order comes from torch's samplers, they draw
    it at the beginning of an epoch. Otherwise it could draw at any time, so it gets random numbers
    of its own, which the training does not advance.

    ``steps`` returns the microbatches of the window that begins; a window is read when it does.
    """

    def __init__(self, loader: Iterable[Any], steps: Callable[[], int]) -> None:
        self.loader = loader
        self._steps = steps
        order = getattr(loader, "batch_sampler", None)
        self._order = order if isinstance(order, PartitionedBatches) else None
        self._stream = loader if isinstance(loader, StreamLoader) else None
        self._generators = generators(loader)
        self._random: dict[str, RandomState] = {}
        self._position: dict[str, Any] | None = None
        self._reads = WITH_TRAINING if self._draws_at_beginning() else ALONE
        self._epoch_reads = self._reads
        self._reader: OwnRandom | None = None
        self._upcoming: list[Any] = []

    @property
    def samples(self) -> int | None:
        """Number of samples of a microbatch over all ranks; None if the loader does not tell."""
        if self._stream is not None:
            return self._stream.microbatch
        return None if self._order is None else self._order.batch_size * self._order.world_size

    @property
    def left_out(self) -> LeftOut | None:
        """The samples that are read no more."""
        return None if self._order is None else self._order.left_out

    @left_out.setter
    def left_out(self, left_out: LeftOut | None) -> None:
        if self._order is not None:
            self._order.left_out = left_out

    @property
    def uneven(self) -> bool:
        """Whether the data may end earlier on this rank than on others, which it waits for then."""
        return self._stream is not None and self._stream.uneven

    def require_other_position(self, held_out: Any) -> None:
        """Refuse held-out data whose reading would change the position of this data."""
        if self._stream is not None and self._stream.shares_position(held_out):
            raise ValueError(
                "the training data and the held-out data are one stream, which has one position: "
                "make it twice, or use num_workers=1"
            )

    def indices(self, epoch: int, microbatch: int) -> list[list[int]] | None:
        """Return the indices of the samples that each data-parallel rank reads in a microbatch."""
        if self._order is None:
            return None
        order = copy.copy(self._order)
        order.set_epoch(epoch)
        dataset = getattr(self.loader, "dataset", None)
        return [list(origin(dataset, part)[1]) for part in order.parts(microbatch)]

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Window]:
        """Read an epoch from microbatch ``first`` on, where the state was taken."""
        for part in ("batch_sampler", "sampler", "dataset"):
            set_epoch(getattr(self.loader, part, None), epoch)
        training = RandomState.now(self._generators)
        self._prepare_random(training, first)
        batches = self._read(lambda: self._from(first) if first else self._begin())
        length = self._length()
        if length is not None:
            if first:
                training.restore(self._generators)
            yield from self._of_length(length, batches, first)
            return
        if first and "ahead" in self._random:
            self._random["ahead"].restore(self._generators)
        upcoming = self._next(batches, 1)
        if first and self._reads_others(upcoming):
            # The state of the stream lacks something: random numbers of a map of many rows, say.
            batches = self._read_again(first)
            upcoming = self._next(batches, 1)
            if self._reads_others(upcoming):
                _logger.warning(OTHER_SAMPLES)
        if first:
            training.restore(self._generators)
        yield from self._of_unknown_length(batches, upcoming, first)

    def _prepare_random(self, training: RandomState, first: int) -> None:
        """Restore the random numbers of the beginning of an epoch; note them where it begins."""
        if first:
            # When an epoch begins, a sampler may draw its order, and a loader its workers' seeds.
            self._random["epoch"].restore(self._generators)
        else:
            self._random = {"epoch": training}
            self._epoch_reads = self._reads
        self._reader = None
        if self._epoch_reads == ALONE:
            self._reader = OwnRandom.seeded(self._random["epoch"].digest())

    def _of_length(self, length: int, batches: Iterator[Any], first: int) -> Iterator[Window]:
        while first < length:
            steps = self._steps()
            window = self._next(batches, steps)
            yield Window(first, window, last=first + steps >= length)
            first += steps

    def _of_unknown_length(
        self, batches: Iterator[Any], upcoming: list[Any], first: int
    ) -> Iterator[Window]:
        """Read one microbatch ahead, to know which window is the last."""
        while upcoming or self.uneven:
            steps = self._steps()
            window = upcoming
            if window:
                window += self._next(batches, steps - 1)
            if self._reader is None:
                self._random["ahead"] = RandomState.now(self._generators)
            upcoming = self._next(batches, 1)
            self._upcoming = upcoming
            end = first + len(window)
            if self._stream is not None:
                self._position = self._stream.position(end)
                if self._stream.uneven:
                    full = first + steps
                    window += [self._stream.stand_in(number) for number in range(end, full)]
                    end = full
            yield Window(first, window, last=not upcoming)
            first = end

    def _reads_others(self, upcoming: list[Any]) -> bool:
        """Return True if these are not the batches that followed when the state was saved."""
        saved = (self._position or {}).get("next")
        if saved is None or self._stream is None or not upcoming:
            return False
        mark = self._stream.mark_of(upcoming[0])
        return bool(saved["part"] == mark["part"] and saved["checksum"] != mark["checksum"])

    def _read_again(self, first: int) -> Iterator[Any]:
        """Read the stream again up to a microbatch, without its state."""
        assert self._stream is not None
        assert self._position is not None
        self._random["ahead"].restore(self._generators)
        self._stream.set_start(first, self._position, read_again=True)
        return self._begin()

    def _next(self, batches: Iterator[Any], count: int) -> list[Any]:
        return self._read(lambda: list(islice(batches, count)))

    def _read(self, work: Callable[[], T]) -> T:
        return work() if self._reader is None else self._reader.during(work)

    def _begin(self) -> Iterator[Any]:
        start_workers_anew(self.loader)
        return iter(self.loader)

    def _from(self, first: int) -> Iterator[Any]:
        """Begin an epoch at a microbatch; a loader without an order of ours reads those before."""
        if self._order is not None:
            self._order.set_start(first)
        elif self._stream is not None:
            assert self._position is not None
            self._stream.set_start(first, self._position)
        batches = self._begin()
        if self._order is None and self._stream is None:
            next(islice(batches, first, first), None)
        return batches

    def state_dict(self) -> dict[str, Any]:
        states = {**self._random, "now": RandomState.now(self._generators)}
        saved: dict[str, Any] = {name: state.state_dict() for name, state in states.items()}
        saved["reads"] = self._epoch_reads
        if self._stream is not None and self._position is not None:
            mark = self._stream.mark_of(self._upcoming[0]) if self._upcoming else None
            saved["stream"] = {**self._position, "next": mark}
        return saved

    def require(self, state: Mapping[str, Any], progress: Progress) -> None:
        """Check that an epoch can be continued; one that begins needs no position."""
        if progress.batch == 0:
            return
        if self._stream is not None and "stream" in state:
            self._stream.require(state["stream"], progress.epoch)
        if "reads" not in state and progress.epoch and has_persistent_workers(self.loader):
            raise ValueError(
                "the checkpoint is of an earlier version, which kept the workers of this loader "
                "from epoch to epoch: continue from the end of an epoch, or from one in the first"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the random states; :meth:`epoch` then continues where the state was taken."""
        states = dict(state)
        self._position = states.pop("stream", None)
        # Earlier versions read every loader with the random numbers of the training.
        self._epoch_reads = states.pop("reads", WITH_TRAINING)
        self._random = {name: RandomState.of(saved) for name, saved in states.items()}
        self._random.pop("now").restore(self._generators)

    def _draws_at_beginning(self) -> bool:
        """Return True if the order of an epoch is known when its first microbatch is read."""
        if self._order is not None or self._stream is not None:
            return True
        return isinstance(self.loader, list | tuple) or self._length() is not None

    def _length(self) -> int | None:
        """Return the microbatches of an epoch; None if only the end of the data tells it."""
        if type(self.loader) not in (DataLoader, WorkerLoader):
            return None
        if self._order is not None:
            return len(self._order)
        order: Any = getattr(self.loader, "batch_sampler", None)
        if type(order) is BatchSampler and type(order.sampler).__module__ in EXACT:
            return len(order)
        return None


def has_no_sample(loader: Any, microbatch: int) -> bool:
    """Return True if this rank has no sample of a microbatch, only one to run along with."""
    source = loader if isinstance(loader, StreamLoader) else getattr(loader, "batch_sampler", None)
    return isinstance(source, StreamLoader | PartitionedBatches) and source.weightless(microbatch)


def held_out(loader: Any, plugin: Plugin) -> Iterator[tuple[bool, Any]]:
    """Yield held-out batches, each with whether it has no weight, as often on each rank.

    Raises:
        ValueError: the data of some ranks has no batch, on every rank.
    """
    start_workers_anew(loader)
    batches = iter(loader)
    ended = object()
    previous: Any = ended
    is_stream = isinstance(loader, StreamLoader)
    ends_together = _ends_together(loader)
    for number in count():
        batch: Any = next(batches, ended)
        idle = has_no_sample(loader, number)
        if not ends_together:
            reading = plugin.sum_over_ranks([float(batch is not ended)])[0]
            if number == 0 and 0 < reading < plugin.world_size and not is_stream:
                raise ValueError(NO_HELD_OUT)
            if reading and batch is ended:
                # Ranks may communicate in a forward pass: all of them run as many.
                batch = loader.stand_in(number) if is_stream else previous
                idle = True
        if batch is ended:
            return
        previous = batch
        yield idle, batch


def _ends_together(loader: Any) -> bool:
    """Return True if a loader ends at the same batch on each rank."""
    if isinstance(loader, StreamLoader):
        return not loader.uneven
    parts = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return any(isinstance(part, PartitionedBatches | DistributedSampler) for part in parts)
