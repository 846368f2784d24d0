"""Worker processes of data loaders: how they start, fail and end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, get_worker_info

from runner.config.notation import in_one_line
from runner.data.samples import SeededSamples, place_of

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a terminal or a cluster sends to all processes of a run. The training process
decides what to do, and needs its workers until then."""

_CHECK_SECONDS = 1.0
"""Between two looks of a worker at whether its training process still lives, and the longest wait
for the end of a worker."""

_SENT = (Tensor, np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))
"""Types that a worker can send, whatever their values."""


class DataError(RuntimeError):
    """A sample could not be read, or no batch be made of samples; the message says where.

    It is raised in the training process. If a worker failed, the second paragraph is its traceback.
    """


@dataclass
class Unread:
    """What a worker sends in place of a batch that it failed to read."""

    message: str


class WorkerDataset(SeededSamples):
    """Samples as worker processes read them: an error becomes a message, which always arrives."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if get_worker_info() is None:
            return super().__getitems__(indices)
        try:
            return self._read(indices)
        except (Exception, SystemExit) as error:
            # Not the exception itself: a class that cannot be pickled would never arrive
            return unread(place_of(self.dataset, self.reading), error)


@dataclass(eq=False, repr=False)
class Collate:
    """Makes a batch of samples; a sample that is None, or a worker's batch that fails, is named."""

    dataset: Dataset[Any]
    collate: Callable[[Any], Any]
    indices_of_batch: Callable[[], Sequence[int]]
    sendable: set[type] = field(default_factory=set)

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, Unread):
            return samples
        in_worker = get_worker_info() is not None
        try:
            batch = self.collate(samples)
            if in_worker:
                self._require_sendable(batch)
        except Exception as error:
            missing = self._missing(samples)
            if missing and in_worker:
                reason = TypeError("the sample is None")
                reason.__cause__ = error
                return unread(place_of(self.dataset, missing), reason)
            if missing:
                raise DataError(f"{place_of(self.dataset, missing)}: it is None") from error
            place = place_of(self.dataset, self.indices_of_batch())
            if in_worker:
                return unread(place, error)
            error.add_note(f"while a batch was made of {place}")
            raise
        return batch

    def _missing(self, samples: Any) -> list[int]:
        """Return the indices of samples that are None."""
        if not isinstance(samples, list):
            return []
        pairs = zip(self.indices_of_batch(), samples, strict=False)
        return [index for index, sample in pairs if sample is None]

    def _require_sendable(self, batch: Any) -> None:
        """Raise an error for what a worker cannot send: torch would wait for it for ever."""
        for leaf in tree_leaves(batch):
            kind = type(leaf)
            if isinstance(leaf, _SENT) or kind in self.sendable:
                continue
            try:
                pickle.dumps(leaf)
            except Exception as error:
                message = f"a batch holds {kind.__qualname__}, which cannot be pickled"
                raise TypeError(message) from error
            self.sendable.add(kind)


class WorkerLoader(DataLoader[Any]):
    """A loader of map-style data whose worker processes live on from epoch to epoch."""

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        collate_fn: Callable[[Any], Any],
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("persistent_workers", True)
        kwargs.setdefault("multiprocessing_context", start_method())
        prepare = partial(begin, then=kwargs.pop("worker_init_fn", None))
        read = WorkerDataset(dataset, seed)
        collate = Collate(dataset, collate_fn, partial(getattr, read, "reading"))
        super().__init__(read, worker_init_fn=prepare, collate_fn=collate, **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        dataset = self.dataset.dataset  # type: ignore[attr-defined]
        if self._iterator is not None:
            # A loader without workers draws this number in each epoch, and so does one that starts
            # its workers: the random numbers of a model must not depend on either.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            return arrived(super().__iter__(), dataset, self.timeout)
        reads: Any = shielded(super().__iter__)
        queues = reads._index_queues
        weakref.finalize(reads, end_workers, reads._workers_done_event, queues).atexit = False
        return arrived(reads, dataset, self.timeout)


def end_workers(done: Any, queues: Sequence[Any]) -> None:
    """Tell the workers of an iterator to end, if torch has not told them.

    An iterator that is found in a cycle of garbage loses its queues before torch can put the end
    into them, and torch then waits five seconds for each.
    """
    if done.is_set():
        return
    done.set()
    for queue in queues:
        queue.put(None)


def arrived(reads: Iterator[Any], dataset: Any, timeout: float) -> Iterator[Any]:
    """Yield what workers send; raise a DataError if one fails, dies, or sends nothing in time."""
    while True:
        try:
            batch = next(reads)
        except StopIteration:
            return
        except RuntimeError as error:
            text = str(error)
            if text.startswith("DataLoader timed out"):
                late = f"no batch in {timeout:g} s, the time-out for data (launch.timeout)"
                raise DataError(f"{place_of(dataset)}: {late}; its loader workers hang") from None
            if text.startswith("DataLoader worker"):  # it was killed, or its C code ended it
                raise DataError(f"{place_of(dataset)}: {text}") from None
            raise
        except (EOFError, OSError) as error:
            raise DataError(f"{place_of(dataset)}: {_end_of_worker()}") from error
        if isinstance(batch, Unread):
            raise DataError(batch.message)
        yield batch


def _end_of_worker() -> str:
    """Return how a worker ended whose batch was cut off.

    The batch is cut off before the process is gone. Then torch's handler of SIGCHLD raises how it
    ended: here, where that is told, and not while torch ends the other workers.
    """
    try:
        time.sleep(_CHECK_SECONDS)
    except RuntimeError as error:
        return str(error)
    return "a worker ended before its batch had arrived, as C code or the system does"


def unread(place: str, error: BaseException) -> Unread:
    """Return what a worker sends for samples that it failed to read."""
    info = get_worker_info()
    worker = "" if info is None else f", worker {info.id}"
    called = "".join(traceback.format_exception(error))
    return Unread(f"{place}{worker}: {in_one_line(error)}\n\nIn the worker:\n{called}")


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
    """Return how workers of this process are started; None for the default of the system."""
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
    if then is None:
        return
    try:
        then(worker)
    except Exception as error:  # its class may be one that cannot be pickled
        called = "".join(traceback.format_exception(error))
        raise RuntimeError(f"worker_init_fn: {in_one_line(error)}\n\n{called}") from None


def _watch(parent: BaseProcess) -> None:
    """End this process when its parent asks for it by SIGTERM, or is gone."""
    while True:
        received = signal.sigtimedwait([signal.SIGTERM], _CHECK_SECONDS)
        if not parent.is_alive() or (received is not None and received.si_pid == parent.pid):
            os._exit(0)
