"""Data sets without an index, divided over data-parallel ranks and their worker processes.

A stream is an :class:`torch.utils.data.IterableDataset`. Each of its samples is read once, over all
ranks and workers. Who divides it:

1. **The runner**, by default. Every process reads the whole stream and keeps its part of each
   microbatch. So a stream has to yield the same samples in each of them: it reads on as in one
   process (``get_worker_info()`` is None there), and draws the same random numbers. Step k then has
   the same samples whatever the number of ranks, workers and microbatches, as for map-style data.
2. **Its method** ``shard(num_shards, index)``, as of Hugging Face's data sets: each process reads
   the part that it returns. A stream with an attribute ``num_shards`` that is smaller than the
   number of processes is divided by the runner instead.
3. **Itself**, if its attribute ``shards_itself`` is True: its ``__iter__`` yields the samples of
   this rank and this worker, by ``torch.distributed.get_rank()`` and ``get_worker_info()``.

Parts of unequal length are no problem: a rank whose part has ended goes on with batches of weight
zero until all parts have ended.

The position in a stream is saved by its ``state_dict()`` and ``load_state_dict()`` where it has
both, or where its iterator has them. Another stream is read again from the start of the epoch, up
to the position.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from runner.data.random_state import RandomState
from runner.data.seeding import seed_for

T = TypeVar("T")


class Read(NamedTuple):
    """What a process reads for one microbatch of its rank."""

    batch: Any
    weightless: bool
    worker: int
    position: dict[str, Any]
    mark: int = 0


class Stream(IterableDataset[Read]):
    """The microbatches of one rank, in worker processes or in the training process."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool,
        seed: int,
        collate: Callable[[list[Any]], Any],
        workers: int,
    ) -> None:
        self.dataset = dataset
        self.batch_size, self.drop_last = batch_size, drop_last
        self.rank, self.world_size = rank, world_size
        self.seed, self.collate = seed, collate
        self.workers = max(1, workers)
        self.epoch = 0
        self.begin_at()

    def begin_at(
        self, start: int = 0, turn: int = 0, positions: Mapping[int, dict[str, Any]] | None = None
    ) -> None:
        """Set where the next iteration begins."""
        self.start, self.turn = start, turn
        self.positions = dict(positions or {})

    @property
    def parts(self) -> int:
        """Number of processes that read the stream."""
        return self.world_size * self.workers

    @property
    def divided_by(self) -> str:
        """Who divides the stream: ``runner``, ``shard`` or ``itself``."""
        if getattr(self.dataset, "shards_itself", False):
            return "itself"
        if not callable(getattr(self.dataset, "shard", None)):
            return "runner"
        return (
            "shard" if getattr(self.dataset, "num_shards", self.parts) >= self.parts else "runner"
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Read]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        start, turn, positions = self.start, self.turn, self.positions
        self.begin_at()
        if self.divided_by == "runner":
            return self._divided(worker, start, positions.get(0, {}))
        worker = (worker + turn) % self.workers
        return self._own(worker, positions.get(worker, {}))

    def first(self) -> Read | None:
        """Return a batch of the part of this rank; None if that is empty."""
        parts = (self._own(worker, {}) for worker in range(self.workers))
        return next((read for part in parts for read in islice(part, 1)), None)

    def _divided(self, worker: int, start: int, position: Mapping[str, Any]) -> Iterator[Read]:
        """Read the whole stream; yield this rank's part of each of this worker's microbatches."""
        samples = _Samples(self.dataset, f"stream,{self.seed},{self.epoch}", position, alone=True)
        whole = self.batch_size * self.world_size
        for number in count(start if samples.continued else 0):
            group = samples.take(whole)
            if not group or (self.drop_last and len(group) < whole):
                return
            if number < start or (number - start) % self.workers != worker:
                continue
            size, longer = divmod(len(group), self.world_size)
            first = self.rank * size + min(self.rank, longer)
            part = group[first : first + size + (self.rank < longer)]
            batch = samples.quietly(lambda: self.collate(part or group[:1]))  # noqa: B023
            mark = checksum(group) if number == start else 0
            yield Read(batch, not part, 0, samples.position(number + 1), mark)

    def _own(self, worker: int, position: Mapping[str, Any]) -> Iterator[Read]:
        """Read the part of the stream that is this worker's."""
        index = self.rank * self.workers + worker
        divided = self.divided_by == "shard"
        dataset: Any = self.dataset
        if divided:
            dataset = dataset.shard(num_shards=self.parts, index=index)
        purpose = f"stream,{self.seed},{self.epoch},{index}"
        samples = _Samples(dataset, purpose, position, alone=divided)
        done = position.get("batches", 0)
        for number in count(done if samples.continued else 0):
            group = samples.take(self.batch_size)
            if not group or (self.drop_last and len(group) < self.batch_size):
                return
            if number < done:
                continue
            batch = samples.quietly(lambda: self.collate(group))  # noqa: B023
            yield Read(batch, False, worker, samples.position(number + 1))


class _Samples:
    """The samples of a stream, drawn with random numbers of their own."""

    def __init__(
        self, dataset: Any, purpose: str, position: Mapping[str, Any], alone: bool
    ) -> None:
        self._alone = alone
        seed = seed_for(purpose, 0, 0)
        outer = RandomState.now({}, with_gpu=False)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        self._random = RandomState.now({}, with_gpu=False)
        outer.restore({})
        self.continued = "state" in position
        if self.continued:
            self._random = RandomState.of(position["random"])
        self._iterator: Iterator[Any] = self.quietly(lambda: self._begin(dataset, position))

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
        """Return the next samples, fewer at the end."""
        return self.quietly(lambda: list(islice(self._iterator, samples)))

    def quietly(self, work: Callable[[], T]) -> T:
        """Run ``work`` with the random numbers of the stream, and as its only worker."""
        outer = RandomState.now({}, with_gpu=False)
        self._random.restore({})
        try:
            with _without_workers() if self._alone else _as_it_is():
                return work()
        finally:
            self._random = RandomState.now({}, with_gpu=False)
            outer.restore({})

    def position(self, batches: int) -> dict[str, Any]:
        """Return the position after so many batches, with the state of the stream if it has one."""
        if self._stateful is None:
            return {"batches": batches}
        state = copy.deepcopy(self._stateful.state_dict())
        return {"batches": batches, "state": state, "random": self._random.state_dict()}


def has_state(of: Any) -> bool:
    """Return whether a position can be read from a stream, and given to it."""
    return all(callable(getattr(of, name, None)) for name in ("state_dict", "load_state_dict"))


def checksum(batch: Any) -> int:
    """Return a checksum of the numbers and texts in a batch, or in a list of samples; at least
    1.
    """
    digest = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().cpu().contiguous().flatten()
            content = flat.view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, np.ndarray):
            content = leaf.tobytes()
        else:
            known = isinstance(leaf, int | float | str | bytes)
            content = repr(leaf if known else type(leaf)).encode()  # others may print an address
        digest = zlib.crc32(content, digest)
    return digest % 2**20 + 1


@contextmanager
def _without_workers() -> Iterator[None]:
    """Let ``get_worker_info()`` return None: a stream that divides itself by it is read whole."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield
