"""A loader of streams, and the position of the training in one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from runner.data.dataset import collate_pairs
from runner.data.stream import Read, Stream
from runner.data.workers import begin, shielded, start_method


class StreamLoader(DataLoader[Any]):
    """Loads this rank's part of a stream; see :mod:`runner.data.stream` for how it is divided."""

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
            dataset, batch_size, rank, world_size, drop_last, seed, collate, num_workers
        )
        if num_workers:
            kwargs.setdefault("multiprocessing_context", start_method())
        kwargs["worker_init_fn"] = partial(begin, then=kwargs.pop("worker_init_fn", None))
        super().__init__(
            stream, batch_size=None, collate_fn=_unchanged, num_workers=num_workers, **kwargs
        )
        self._after: dict[int, _Position] = {}
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
        """Whether the stream may end earlier on one rank than on another."""
        return self.dataset.world_size > 1 and self.dataset.divided_by != "runner"

    def weightless(self, microbatch: int) -> bool:
        """Return whether this rank has no sample of a microbatch that was read."""
        return microbatch in self._weightless

    def set_start(self, microbatch: int, position: Mapping[str, Any]) -> None:
        """Begin the next iteration at a microbatch, before which ``position`` was the position."""
        self.dataset.begin_at(microbatch, position["turn"], position["workers"])

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        stream = self.dataset
        start, position = stream.start, _Position(stream.turn, dict(stream.positions))
        reads = shielded(super().__iter__)
        if self.num_workers:  # They have copies.
            stream.begin_at()
        self._after, self._weightless = {start: position}, set()
        return self._batches(reads, start)

    def _batches(self, reads: Iterator[Read], number: int) -> Iterator[Any]:
        for read in reads:
            self.mark = read.mark or self.mark
            if read.weightless:
                self._weightless.add(number)
            workers = {**self._after[number].workers, read.worker: read.position}
            number += 1
            self._after[number] = _Position((read.worker + 1) % self.dataset.workers, workers)
            self._stand_in = read.batch
            yield read.batch

    def stand_in(self, microbatch: int) -> Any:
        """Return a batch of weight zero for a microbatch that this rank has no sample of."""
        self._weightless.add(microbatch)
        if self._stand_in is None:
            first = self.dataset.first()
            if first is None:
                stream = self.dataset
                raise ValueError(
                    f"data-parallel rank {stream.rank} of {stream.world_size} reads no sample: the "
                    "part of this stream that is its own is empty; use fewer ranks and "
                    "data.num_workers, or a data set with more shards"
                )
            self._stand_in = first.batch
        return self._stand_in

    def position(self, microbatch: int) -> dict[str, Any]:
        """Return the position before a microbatch; earlier ones are forgotten."""
        last = max(self._after)
        self._after = {n: at for n, at in self._after.items() if n >= min(microbatch, last)}
        at = self._after[min(microbatch, last)]
        return {"parts": self._parts(), "turn": at.turn, "workers": at.workers}

    def require(self, position: Mapping[str, Any]) -> None:
        """Check a position that :meth:`restore` is given."""
        own = self._parts()
        if position["parts"] != own:
            told = [
                "by the runner" if of is None else f"over {of[0]} ranks x {of[1]} workers"
                for of in (position["parts"], own)
            ]
            raise ValueError(
                f"the stream of the checkpoint is divided {told[0]}, here {told[1]}: continue with "
                "the same number of data-parallel ranks and data.num_workers"
            )

    def _parts(self) -> list[int] | None:
        """Return the numbers of ranks and workers with positions of their own; None if none."""
        stream = self.dataset
        return None if self.microbatch is not None else [stream.world_size, stream.workers]


class _Position(NamedTuple):
    """The worker whose turn is next, and the position of each worker that has read something."""

    turn: int
    workers: dict[int, dict[str, Any]]


def _unchanged(read: Any) -> Any:
    return read
