"""Worker processes of data loaders: how they start and end, and their random numbers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from runner.data.order import Indices, seed_all, seed_for, set_epoch

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a terminal or a cluster sends to all processes of a run. The training process
decides what to do, and needs its workers until then."""

_CHECK_SECONDS = 1.0  # between two looks of a worker at whether its training process still lives


@dataclass(eq=False, repr=False)
class WorkerDataset(Dataset[Any]):
    """A data set as worker processes read it: a sample depends on seed, epoch and index alone."""

    dataset: Dataset[Any]
    seed: int
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; workers that run already get it with the indices of a batch."""
        self.epoch = epoch
        set_epoch(self.dataset, epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        self._seed_generators(index)
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if isinstance(indices, Indices) and indices.epoch != self.epoch:
            self.set_epoch(indices.epoch)
        if not callable(read := getattr(self.dataset, "__getitems__", None)):
            return [self[index] for index in indices]
        self._seed_generators(indices[0])
        return read(indices)

    def _seed_generators(self, index: int) -> None:
        if get_worker_info() is None:  # someone looks at a sample in the training process
            return
        seed_all(seed_for(f"sample {index} in a worker", self.seed, self.epoch))


class WorkerLoader(DataLoader[Any]):
    """A loader of map-style data whose worker processes live on from epoch to epoch."""

    def __init__(self, dataset: Dataset[Any], seed: int, **kwargs: Any) -> None:
        kwargs.setdefault("persistent_workers", True)
        kwargs.setdefault("multiprocessing_context", start_method())
        prepare = partial(begin, then=kwargs.pop("worker_init_fn", None))
        super().__init__(WorkerDataset(dataset, seed), worker_init_fn=prepare, **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._iterator is not None:
            # A loader without workers draws this number in each epoch, and so does one that starts
            # its workers: the random numbers of a model must not depend on either.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            return super().__iter__()
        return shielded(super().__iter__)


def start_workers_anew(loader: Any) -> None:
    """Let a loader of torch's start its persistent workers again when it is iterated next.

    Their random numbers would go on from the epoch before, of which a training that continues
    knows nothing, and only the first iterator of a loader draws a seed for them.
    """
    for part in _with_persistent_workers(loader):
        part._iterator = None


def has_persistent_workers(loader: Any) -> bool:
    """Return True if a loader that is not this project's keeps its workers after an epoch."""
    return bool(_with_persistent_workers(loader))


def _with_persistent_workers(loader: Any) -> list[DataLoader[Any]]:
    """Return the loader, and those that its attributes are, if workers live on from an epoch.

    Those of :class:`WorkerLoader` may: they draw each sample with a seed of its own.
    """
    parts = [loader, *getattr(loader, "__dict__", {}).values()]
    loaders = [part for part in parts if isinstance(part, DataLoader)]
    return [part for part in loaders if part.persistent_workers and type(part) is not WorkerLoader]


def shielded(start: Callable[[], T]) -> T:
    """Return ``start()``, which starts workers that call :func:`begin`, while signals wait."""
    # A worker that forks inherits the mask: no signal finds it before it is prepared.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGTERM))
    try:
        return start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_method() -> str | None:
    is_local_rank = multiprocessing.parent_process() is not None
    if not is_local_rank or multiprocessing.get_start_method(allow_none=True) != "forkserver":
        return None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        multiprocessing.set_forkserver_preload([__name__])
        return "forkserver"
    return "fork"


def begin(worker: int, then: Callable[[int], None] | None) -> None:
    """Prepare a worker: its training process alone ends it, and it does not live longer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The thread takes SIGTERM, since only sigtimedwait tells who sent it.
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGTERM])
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent-watch").start()
    if then is not None:
        then(worker)


def _watch(parent: BaseProcess) -> None:
    """End this process when its parent asks for it by SIGTERM, or is gone."""
    while True:
        received = signal.sigtimedwait([signal.SIGTERM], _CHECK_SECONDS)
        if not parent.is_alive() or (received is not None and received.si_pid == parent.pid):
            os._exit(0)
