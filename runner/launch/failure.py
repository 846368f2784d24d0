"""Why a run does not finish: a signal, or a rank that failed (see README)."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from signal import SIGINT
from typing import Any, Literal

from runner.config.notation import in_one_line, message_of
from runner.launch import signals
from runner.run_folder.strict_json import disk_full
from runner.train import stop

KNOBS = (
    "out of memory: lower data.batch_size (accumulation.steps keeps the size of the step), or "
    "shard the model over more ranks (plugin=fsdp, plugin=tensor, plugin=pipeline)"
)
_WORKER = re.compile(r"DataLoader worker \(pid.*\) (exited unexpectedly|is killed by signal)")
_OUT_OF_MEMORY = re.compile(r"out of memory|(can't|cannot) allocate memory", re.I)
# Gloo writes its file before each message. Where it only checks arguments it adds "enforce fail".
_GLOO = re.compile(
    r"^(?!.*enforce fail).*"
    r"(gloo/transport/|Gloo connectFullMesh failed|Application timeout caused pair closure)",
    re.S,
)


@dataclass(eq=False)
class Failure(Exception):
    """Why a run did not finish; raised where a rank failed.

    Attributes:
        error: traceback of the exception with its causes, or a sentence.
        summary: the exception and its causes in one line; by default the last line of ``error``.
        others: how other ranks ended, one text each.
    """

    error: str
    rank: int | None = None
    node: str | None = None
    state: Literal["failed", "interrupted"] = "failed"
    exit_code: int = 1
    disk_full: bool = False
    summary: str = ""
    others: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The summary, after the rank if that is known."""
        summary = self.summary or self.error.strip().rpartition("\n")[2]
        told = self.rank is None or summary.startswith(f"rank {self.rank} ")
        return summary if told else f"rank {self.rank}: {summary}"


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | Failure:
    """Return what ``work`` returns, or why it has not come to its end: an exception or a signal."""
    try:
        asked_before = stop.reset()
        if asked_before:
            raise signals.Terminated(asked_before)
        return work()
    except BaseException as error:
        stop.defer()  # the record is written whole
        number = 0 if isinstance(error, Failure) else stopped_by(error)
        if number:
            code = signals.exit_code(number)
            return Failure(signals.reason(number), state="interrupted", exit_code=code)
        if isinstance(error, Failure):
            failed = error
            full = disk_full(failed.error)
        else:
            failed = Failure(described(error), rank=0, summary=summary_of(error))
            full = disk_full(error)
        if full is None:
            return failed
        return replace(failed, error=full, summary=full, disk_full=True)


def described(error: BaseException) -> str:
    """Return the traceback of ``error`` with its causes, and advice if memory is short."""
    text = "".join(traceback.format_exception(error)).strip()
    return f"{text}\n{KNOBS}" if _is_out_of_memory(error) else text


def summary_of(error: BaseException) -> str:
    """Return ``error``, its notes and its causes in one line, with advice if memory is short."""
    line = in_one_line(error)
    return f"{line}; {KNOBS}" if _is_out_of_memory(error) else line


def is_lost_peer(error: BaseException) -> bool:
    """Return whether ``error`` follows from a peer that is gone or silent.

    That is an error of the transport between ranks, or one that was raised because of it.
    """
    return any(_is_of_transport(raised) for raised in _chain(error))


def stopped_by(error: BaseException) -> int:
    """Return the signal that ``error`` follows from; 0 for none."""
    if isinstance(error, KeyboardInterrupt):
        return SIGINT if signals.may_have_raised() else 0
    if isinstance(error, stop.Stopped | signals.Terminated):
        return error.signal
    return stop.requested() if _WORKER.search(message_of(error)) or is_lost_peer(error) else 0


def tells_of_memory(failure: Failure) -> bool:
    """Return whether a rank failed because it ran out of memory."""
    texts = (failure.error, failure.summary, *failure.others)
    return any(_OUT_OF_MEMORY.search(text) for text in texts)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then what it was raised from or while handling."""
    seen = set[int]()
    raised: BaseException | None = error
    while raised is not None and id(raised) not in seen:
        seen.add(id(raised))
        yield raised
        implicit = None if raised.__suppress_context__ else raised.__context__
        raised = raised.__cause__ or implicit


def _is_of_transport(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return False
    from torch.distributed import DistError

    return isinstance(error, DistError) or _GLOO.search(message_of(error)) is not None


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is one of memory, or follows from one, as in a pipeline's stage."""
    for raised in _chain(error):
        of_torch = isinstance(raised, RuntimeError) and _OUT_OF_MEMORY.search(message_of(raised))
        if of_torch or isinstance(raised, MemoryError):
            return True
    return False
