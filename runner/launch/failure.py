"""Reasons why a run does not finish: a failed rank, an interrupt, a signal."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal


@dataclass(frozen=True)
class Failure:
    """Why a run did not finish."""

    state: Literal["failed", "interrupted"]
    exit_code: int
    error: str
    rank: int | None = None


class Terminated(BaseException):
    """SIGTERM was received."""


class RankFailed(Exception):
    """A local rank failed; the exception has its number, and its traceback or signal."""

    def __init__(self, rank: int, error: str) -> None:
        super().__init__(rank, error)
        self.rank = rank
        self.error = error


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | Failure:
    """Return what ``work`` returns, or why it failed; SIGTERM counts as a failure."""
    try:
        with _terminated_by_sigterm():
            return work()
    except BaseException as error:
        return _why(error)


def _why(error: BaseException) -> Failure:
    if isinstance(error, RankFailed):
        return Failure("failed", 1, error.error, error.rank)
    # torch elastic turns the signals it receives into an exception of its own.
    number = getattr(error, "sigval", None)
    if isinstance(error, KeyboardInterrupt) or number == signal.SIGINT:
        return Failure("interrupted", 130, "interrupted by the user")
    if isinstance(error, Terminated) or number is not None:
        name = signal.Signals(number or signal.SIGTERM).name
        return Failure("interrupted", 143, f"terminated by {name}")
    return Failure("failed", 1, "".join(traceback.format_exception(error)).strip(), 0)


@contextmanager
def _terminated_by_sigterm() -> Iterator[None]:
    """Raise :class:`Terminated` on SIGTERM in this block; restore all handlers afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in watched}
    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
