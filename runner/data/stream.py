"""Data sets without an index, divided over data-parallel ranks and their worker processes.

Each sample of a stream is read once, over all ranks and workers: README.md says who divides it, how
its position is saved, and why torchdata's ``StatefulDataLoader`` does not do.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from runner.data.dataset import collate_pairs
from runner.data.order import RandomState, part_of, seed_all, seed_for, set_epoch
from runner.data.workers import begin, shielded, start_method

T = TypeVar("T")

BEGINNING: Mapping[str, Any] = {"turn": 0, "workers": {}}
"""A position: the worker whose turn is next, and that of each worker that has read something."""


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

    def __iter__(self) -> Iterator[Read]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        start, position = self.start, self.position
        self.start, self.position = 0, BEGINNING
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
        samples = _Samples(self.dataset, f"stream,{self.seed},{self.epoch}", position, alone=True)
        for number, group in self._groups(samples, start, self.batch_size * self.world_size):
            if (number - start) % self.workers == worker:
                part = group[slice(*part_of(len(group), self.rank, self.world_size))]
                batch = samples.quietly(partial(self.collate, part or group[:1]))
                mark = checksum(group) if number == start else 0
                yield Read(batch, not part, 0, samples.position(number + 1), mark)

    def _own(self, worker: int, position: Mapping[str, Any]) -> Iterator[Read]:
        """Read the part of a worker of this rank."""
        index = self.rank * self.workers + worker
        divided = self.divided_by == "shard"
        dataset: Any = self.dataset
        if divided:
            dataset = dataset.shard(num_shards=self.world_size * self.workers, index=index)
        purpose = f"stream,{self.seed},{self.epoch},{index}"
        samples = _Samples(dataset, purpose, position, alone=divided)
        for number, group in self._groups(samples, position.get("batches", 0), self.batch_size):
            batch = samples.quietly(partial(self.collate, group))
            yield Read(batch, False, worker, samples.position(number + 1), 0)

    def _groups(self, samples: _Samples, start: int, size: int) -> Iterator[tuple[int, list[Any]]]:
        """Yield the samples of each microbatch from ``start`` on, with its number."""
        for number in count(start if samples.continued else 0):
            group = samples.take(size)
            if not group or (self.drop_last and len(group) < size):
                return
            if number >= start:
                yield number, group


class _Samples:
    """The samples of a stream, drawn with random numbers of their own."""

    def __init__(
        self, dataset: Any, purpose: str, position: Mapping[str, Any], alone: bool
    ) -> None:
        self._alone, self.continued = alone, "state" in position
        if self.continued:
            self._random = RandomState.of(position["random"])
        else:
            self._random = RandomState.now({}, with_gpu=False)
            self.quietly(partial(seed_all, seed_for(purpose, 0, 0)))
        self._iterator: Iterator[Any] = self.quietly(partial(self._begin, dataset, position))

    def _begin(self, dataset: Any, position: Mapping[str, Any]) -> Any:
        own = has_state(dataset)
        if self.continued and own:
            dataset.load_state_dict(position["state"])
        iterator: Any = iter(dataset)
        if self.continued and not own and has_state(iterator):
            iterator.load_state_dict(position["state"])
        self._stateful: Any = dataset if own else iterator if has_state(iterator) else None
        return iterator

    def take(self, samples: int) -> list[Any]:
        return self.quietly(lambda: list(islice(self._iterator, samples)))

    def quietly(self, work: Callable[[], T]) -> T:
        """Run ``work`` with the random numbers of the stream, and as its only worker."""
        outer = RandomState.now({}, with_gpu=False)
        self._random.restore({})
        try:
            # ``get_worker_info()`` is None: a stream that divides itself by it is read whole.
            with patch.object(torch_worker, "_worker_info", None) if self._alone else nullcontext():
                return work()
        finally:
            self._random = RandomState.now({}, with_gpu=False)
            outer.restore({})

    def position(self, batches: int) -> dict[str, Any]:
        if self._stateful is None:
            return {"batches": batches}
        state = copy.deepcopy(self._stateful.state_dict())
        return {"batches": batches, "state": state, "random": self._random.state_dict()}


def has_state(of: Any) -> bool:
    """Return whether a position can be read from a stream, and given to it."""
    return all(callable(getattr(of, name, None)) for name in ("state_dict", "load_state_dict"))


def checksum(batch: Any) -> int:
    """Return a checksum, at least 1, of the numbers and texts in a batch or a list of samples."""
    digest = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray):
            content = leaf.tobytes()
        else:
            known = isinstance(leaf, int | float | str | bytes)
            content = repr(leaf if known else type(leaf)).encode()  # others may print an address
        digest = zlib.crc32(content, digest)
    return digest % 2**20 + 1


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
        return self.dataset.world_size > 1 and self.microbatch is None

    def weightless(self, microbatch: int) -> bool:
        return microbatch in self._weightless

    def set_start(self, microbatch: int, position: Mapping[str, Any]) -> None:
        """Begin the next iteration at a microbatch, before which ``position`` was the position."""
        self.dataset.start, self.dataset.position = microbatch, position

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        stream = self.dataset
        start = stream.start
        self._after, self._weightless = {start: stream.position}, set()
        reads = shielded(super().__iter__)
        stream.start, stream.position = 0, BEGINNING  # workers have copies
        return self._batches(reads, start)

    def _batches(self, reads: Iterator[Read], number: int) -> Iterator[Any]:
        for read in reads:
            self.mark = read.mark or self.mark
            if read.weightless:
                self._weightless.add(number)
            workers = {**self._after[number]["workers"], read.worker: read.position}
            number, turn = number + 1, (read.worker + 1) % self.dataset.workers
            self._after[number] = {"turn": turn, "workers": workers}
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
        first = min(microbatch, max(self._after))
        self._after = {n: at for n, at in self._after.items() if n >= first}
        return {**self._after[first], "parts": self._parts()}

    def require(self, position: Mapping[str, Any]) -> None:
        if position["parts"] != self._parts():
            raise ValueError(
                f"the stream of the checkpoint is divided over {position['parts']}, here over "
                f"{self._parts()}: use as many data-parallel ranks and data.num_workers"
            )

    def _parts(self) -> str:
        stream = self.dataset
        own = f"{stream.world_size} ranks x {stream.workers} workers"
        return "any ranks" if self.microbatch is not None else own


def _unchanged(read: Any) -> Any:
    return read
