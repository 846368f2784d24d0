"""Reasons why a run does not finish: a failed rank, or a signal."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGINT
from typing import Any, Literal

from runner.config import disk
from runner.config.problem import Stopped
from runner.launch import signals
from runner.train import stop

KNOBS = (
    "out of memory: lower data.batch_size (accumulation.steps keeps the size of the step), or "
    "shard the model over more ranks (plugin=fsdp, plugin=tensor, plugin=pipeline)"
)
"""What to change in a request that needs too much memory."""

COLLECTIVE = ("torch.distributed.", "torch.autograd.graph")
"""Modules of torch that a lost connection is raised in: by a collective, or in a backward pass."""

WAITS = ("runner.clip.exchange", "runner.parallel.overlap", "runner.parallel.pipeline")
"""Modules that wait for a collective that runs beside them, in code of torch without a frame."""

_WORKER = re.compile(
    r"DataLoader worker \(pid.*\) (exited unexpectedly"
    r"|is killed by signal: (Terminated|Interrupt|Hangup|User defined signal 1))"
)

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.I)


@dataclass(frozen=True)
class Failure:
    """Why a run did not finish."""

    state: Literal["failed", "interrupted"]
    exit_code: int
    error: str
    rank: int | None = None
    disk_full: bool = False
    node: str | None = None


class RankFailed(Exception):
    """A rank failed."""

    def __init__(self, rank: int, error: str, node: str | None = None) -> None:
        super().__init__(rank, error, node)
        self.rank, self.error, self.node = rank, error, node


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | Failure:
    """Return what ``work`` returns, or why it failed; a signal counts as a failure."""
    try:
        if number := stop.reset():
            raise signals.Terminated(number)
        return work()
    except BaseException as error:
        stop.requested()  # from here on a signal is noted: the record is written whole
        return _why(error)


def described(error: BaseException) -> str:
    """Return the traceback of an error, and what to change if memory ran out."""
    text = "".join(traceback.format_exception(error)).strip()
    # torch's own errors are recognised by name: this module does not import torch.
    memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if memory or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))):
        return f"{text}\n{KNOBS}"
    return text


def may_be_lost_peer(error: BaseException) -> bool:
    """Return whether ``error`` may be the end of a connection to another rank."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
    lost = modules[-1:] and modules[-1] in WAITS
    return isinstance(error, RuntimeError) and bool(
        lost or any(one.startswith(COLLECTIVE) for one in modules)
    )


def stopped_by(error: BaseException) -> int:
    """Return the number of the signal that ``error`` follows from; 0 for none."""
    if isinstance(error, KeyboardInterrupt):
        return SIGINT
    if isinstance(error, Stopped | signals.Terminated):
        return error.signal
    lost = isinstance(error, RuntimeError) and _WORKER.search(str(error))
    return stop.requested() if lost or may_be_lost_peer(error) else 0


def _why(error: BaseException) -> Failure:
    if number := stopped_by(error):
        return Failure("interrupted", signals.exit_code(number), signals.reason(number))
    if isinstance(error, RankFailed):
        full = disk.told_by_rank(error.error)
        return Failure("failed", 1, full or error.error, error.rank, full is not None, error.node)
    full = disk.told(error)
    return Failure("failed", 1, full or described(error), 0, full is not None)
