"""Data sets without an index, divided over data-parallel ranks and their worker processes.

Each sample of a stream is read once, over all ranks and workers: README.md says who divides it, how
its position is saved, and why torchdata's ``StatefulDataLoader`` does not do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from runner.data.dataset import collate_pairs
from runner.data.order import (
    part_of,
    set_epoch,
)
from runner.data.samples import place_of
from runner.data.stream_samples import StreamSamples, checksum, has_state
from runner.data.workers import (
    Unread,
    arrived,
    begin,
    shielded,
    start_method,
    unread,
)

T = TypeVar("T")

BEGINNING: Mapping[str, Any] = {"turn": 0, "workers": {}}
"""A position: the worker whose turn is next, and each worker's own, if it has read something."""


_STATE = {"examples_iterable", "epoch"}  # keys of the state of a stream of ``datasets``


class Read(NamedTuple):
    """What a process reads for one microbatch of its rank."""

    batch: Any
    weightless: bool
    worker: int
    position: dict[str, Any]
    mark: int


@dataclass(eq=False, repr=False)
class Stream(IterableDataset[Read]):
    """The microbatches of one rank, in worker processes or in the training process."""

    dataset: IterableDataset[Any]
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    seed: int
    collate: Callable[[list[Any]], Any]
    workers: int
    epoch: int = 0
    start: int = 0
    position: Mapping[str, Any] = field(default_factory=lambda: BEGINNING)

    @property
    def divided_by(self) -> str:
        """Who divides the stream: ``runner``, ``shard`` or ``itself``."""
        if getattr(self.dataset, "shards_itself", False):
            return "itself"
        parts = self.world_size * self.workers
        enough = getattr(self.dataset, "num_shards", parts) >= parts
        return "shard" if enough and callable(getattr(self.dataset, "shard", None)) else "runner"

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        set_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[Read | Unread]:  # type: ignore[override]
        info = get_worker_info()
        if info is None:
            return self._noted(self._microbatches(0))
        return self._sent(info.id)

    def _noted(self, reads: Iterator[Read]) -> Iterator[Read]:
        """Yield the microbatches of the training process; a note names one that fails."""
        number = 0
        try:
            for read in reads:
                yield read
                number += 1
        except Exception as error:
            error.add_note(f"while {place_of(self.dataset)}, microbatch {number} was read")
            raise

    def _sent(self, worker: int) -> Iterator[Read | Unread]:
        """Yield the microbatches of a worker; last what it failed to read, as workers send it."""
        number = 0
        try:
            for read in self._microbatches(worker):
                yield read
                number += 1
        except (Exception, SystemExit) as error:
            yield unread(f"{place_of(self.dataset)}, microbatch {number}", error)

    def _microbatches(self, worker: int) -> Iterator[Read]:
        start = self.start
        position = self.position
        self.start = 0
        self.position = BEGINNING
        if self.divided_by == "runner":
            return self._divided(worker, start, position["workers"].get(0, {}))
        worker = (worker + position["turn"]) % self.workers
        return self._own(worker, position["workers"].get(worker, {}))

    def first(self) -> Read | None:
        """Return a batch of the part of this rank; None if that is empty."""
        parts = (self._own(worker, {}) for worker in range(self.workers))
        return next((read for part in parts for read in part), None)

    def _divided(self, worker: int, start: int, position: Mapping[str, Any]) -> Iterator[Read]:
        """Read the whole stream; yield this rank's part of each of this worker's microbatches."""
        samples = StreamSamples(
            self.dataset, f"stream,{self.seed},{self.epoch}", position, alone=True
        )
        for number, group in self._groups(samples, start, self.batch_size * self.world_size):
            if (number - start) % self.workers == worker:
                part = group[slice(*part_of(len(group), self.rank, self.world_size))]
                batch = samples.collated(self.collate, part or group[:1], number)
                mark = checksum(group) if number == start else 0
                yield Read(batch, not part, 0, samples.position(number + 1), mark)

    def _own(self, worker: int, position: Mapping[str, Any]) -> Iterator[Read]:
        """Read the part of a worker of this rank."""
        index = self.rank * self.workers + worker
        divided = self.divided_by == "shard"
        dataset: Any = self.dataset
        if divided:
            dataset = dataset.shard(num_shards=self.world_size * self.workers, index=index)
            set_epoch(dataset, self.epoch)  # a shard of datasets begins again with epoch 0
        purpose = f"stream,{self.seed},{self.epoch},{index}"
        samples = StreamSamples(dataset, purpose, position, alone=divided)
        for number, group in self._groups(samples, position.get("batches", 0), self.batch_size):
            batch = samples.collated(self.collate, group, number)
            yield Read(batch, False, worker, samples.position(number + 1), 0)

    def _groups(
        self, samples: StreamSamples, start: int, size: int
    ) -> Iterator[tuple[int, list[Any]]]:
        """Yield the samples of each microbatch from ``start`` on, with its number."""
        for number in count(start if samples.continued else 0):
            group = samples.take(size)
            if not group or (self.drop_last and len(group) < size):
                return
            if number >= start:
                yield number, group


class StreamLoader(DataLoader[Any]):
    """Loads this rank's part of a stream, and knows the position of the training in it."""

    dataset: Stream

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        drop_last: bool,
        seed: int,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> None:
        collate = kwargs.pop("collate_fn", None) or collate_pairs
        stream = Stream(
            dataset, batch_size, rank, world_size, drop_last, seed, collate, max(1, num_workers)
        )
        if num_workers:
            kwargs.setdefault("multiprocessing_context", start_method())
        kwargs["worker_init_fn"] = partial(begin, then=kwargs.pop("worker_init_fn", None))
        super().__init__(
            stream, batch_size=None, collate_fn=_unchanged, num_workers=num_workers, **kwargs
        )
        self._after: dict[int, Mapping[str, Any]] = {}
        self._weightless: set[int] = set()
        self.mark = 0
        self._stand_in: Any = None

    @property
    def microbatch(self) -> int | None:
        """Samples of a microbatch over all ranks; None if ranks read parts of their own."""
        stream = self.dataset
        return stream.batch_size * stream.world_size if stream.divided_by == "runner" else None

    @property
    def uneven(self) -> bool:
        """Whether the data may end earlier on this rank than on other ranks."""
        return self.dataset.world_size > 1 and self.microbatch is None

    def weightless(self, microbatch: int) -> bool:
        """Return whether this rank has no sample in a microbatch, and reads a stand-in."""
        return microbatch in self._weightless

    def set_start(
        self, microbatch: int, position: Mapping[str, Any], *, read_again: bool = False
    ) -> None:
        """Begin the next iteration at a microbatch, before which ``position`` was the position.

        If ``read_again``, the samples before it are read again, not skipped by the stream's state.
        """
        if read_again:
            parts = position["workers"].items()
            counts = {worker: {"batches": part["batches"]} for worker, part in parts}
            position = {**position, "workers": counts}
        self.dataset.start = microbatch
        self.dataset.position = position

    def mark_of(self, batch: Any) -> dict[str, Any]:
        """Return what tells whether another reader of the same part has read the same batch."""
        stream = self.dataset
        part = f"{stream.rank} of {stream.world_size}, {stream.batch_size} samples"
        return {"part": part, "checksum": checksum(batch)}

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        stream = self.dataset
        self._iterator = None  # persistent workers would not learn of another epoch
        start = stream.start
        self._after = {start: stream.position}
        self._weightless = set()
        reads: Iterator[Any] = shielded(super().__iter__)
        if self.num_workers:
            reads = arrived(reads, stream.dataset, self.timeout)
        stream.start = 0  # workers have copies
        stream.position = BEGINNING
        return self._batches(reads, start)

    def _batches(self, reads: Iterator[Read], number: int) -> Iterator[Any]:
        for read in reads:
            self.mark = read.mark or self.mark
            if read.weightless:
                self._weightless.add(number)
            workers = {**self._after[number]["workers"], read.worker: read.position}
            next_worker = (read.worker + 1) % self.dataset.workers
            number += 1
            self._after[number] = {"turn": next_worker, "workers": workers}
            self._stand_in = read.batch
            yield read.batch

    def stand_in(self, microbatch: int) -> Any:
        """Return a batch of weight zero for a microbatch that this rank has no sample of."""
        self._weightless.add(microbatch)
        if self._stand_in is None:
            stream = self.dataset
            first = stream.first()
            if first is None:
                rank = f"data-parallel rank {stream.rank} of {stream.world_size}"
                raise ValueError(f"{rank} reads no sample: use fewer ranks, or more shards")
            self._stand_in = first.batch
        return self._stand_in

    def position(self, microbatch: int) -> dict[str, Any]:
        """Return the position before a microbatch; earlier positions are forgotten."""
        first = min(microbatch, max(self._after))
        for number in [number for number in self._after if number < first]:
            del self._after[number]
        return {**self._after[first], "parts": self._parts()}

    def require(self, position: Mapping[str, Any], epoch: int) -> None:
        """Check that a position inside ``epoch`` can be continued here."""
        if self.dataset.divided_by == "shard" and _is_of_epoch_0(position, epoch):
            raise ValueError(
                "the checkpoint is of an earlier version, which read the parts of this stream in "
                "the order of epoch 0 in every epoch: continue from the end of an epoch"
            )
        if position["parts"] != self._parts():
            raise ValueError(
                f"the stream of the checkpoint is divided over {position['parts']}, here over "
                f"{self._parts()}: use as many data-parallel ranks and data.num_workers"
            )

    def shares_position(self, other: Any) -> bool:
        """Return True if reading ``other`` would change the position of this stream."""
        if not isinstance(other, StreamLoader) or self.num_workers or other.num_workers:
            return False
        stream = self.dataset
        is_same = stream.dataset is other.dataset.dataset and stream.divided_by != "shard"
        return is_same and has_state(stream.dataset)

    def _parts(self) -> str:
        stream = self.dataset
        if self.microbatch is not None:
            return "any ranks"
        return f"{stream.world_size} ranks x {stream.workers} workers"


def _is_of_epoch_0(position: Mapping[str, Any], epoch: int) -> bool:
    """Return True if a position in a later epoch holds states of ``datasets`` of epoch 0."""
    states = [part.get("state") for part in position["workers"].values()]
    datasets = [state for state in states if isinstance(state, Mapping) and set(state) == _STATE]
    return epoch > 0 and any(state["epoch"] == 0 for state in datasets)


def _unchanged(read: Any) -> Any:
    return read
