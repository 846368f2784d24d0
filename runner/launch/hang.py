"""Find the local rank that the others wait for, by where each of them is."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from runner.launch.local_rank import LocalRank

TRAINS = 2
"""Count of a rank that has begun its first microbatch; with 1 it can be asked for its stack."""

ANSWER = 3.0
"""Seconds that a rank has to say where it is."""

AGAIN = 1.0
"""Seconds between two looks: a rank that waits does so both times."""

_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_WAITING = re.compile(r"/torch/(distributed/|autograd/graph\.py|nn/parallel/distributed\.py)")
_SHELL = re.compile(r"/torch/_ops\.py")
"""Calls of operators, which say nothing of what they do."""


class _Place(NamedTuple):
    """Where a rank is; places of ranks that hang come first in order."""

    goes_on: bool
    waits: bool
    begun: int
    number: int
    stack: tuple[str, ...]

    @property
    def text(self) -> str:
        """Where the rank is, in words."""
        if not self.goes_on:
            return "its process is stopped (SIGSTOP)"
        if not self.stack:
            return "it does not answer"
        return f"it is in {_call(self.stack[0])}"

    @property
    def caller(self) -> str:
        """The innermost call that is not torch's own."""
        return _call(next((line for line in self.stack if "/torch/" not in line), self.stack[0]))


def waited_for(
    ranks: Sequence[LocalRank], counts: Sequence[int], timeout: float
) -> tuple[int, str] | None:
    """Return the rank that the others wait for, and where it is; None if no rank waits."""
    before = {place.number for place in _places(ranks, counts) if place.waits}
    time.sleep(AGAIN)
    places = _places(ranks, counts)
    waiting = {place.number for place in places if place.waits} & before
    # Several that compute may all be on their way; of those that wait, the last one is behind.
    alone = len(places) - len(waiting) <= 1 or not all(place.goes_on for place in places)
    if len(waiting) == len(places) > 1:
        return _deadlock(places, timeout)
    return _named(places[0], timeout) if waiting and alone else None


def behind(
    ranks: Sequence[LocalRank], counts: Sequence[int], timeout: float
) -> tuple[int, str] | None:
    """Return the rank for which a collective of the others took too long, and where it is."""
    places = _places(ranks, counts)
    return _named(places[0], timeout) if places and not places[0].waits else None


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine was stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])


def _call(line: str) -> str:
    found = _FRAME.match(line)
    return f"{found['function']} ({found['file']}:{found['line']})" if found else line


def _places(ranks: Sequence[LocalRank], counts: Sequence[int]) -> list[_Place]:
    places = []
    for rank in ranks:
        goes_on, count = not is_stopped(rank.pid), counts[rank.number]
        stack = tuple(rank.stack(ANSWER)) if goes_on and count else ()
        shown = next((line for line in stack if not _SHELL.search(line)), "")
        waits = bool(_WAITING.search(shown))
        places.append(_Place(goes_on, waits, count, rank.number, stack))
    return sorted(places)


def _deadlock(places: Sequence[_Place], timeout: float) -> tuple[int, str]:
    """Say where ranks are that wait for each other, in different collectives."""
    ordered = sorted(places, key=lambda place: place.number)
    each = "; ".join(f"rank {place.number}: {place.caller}" for place in ordered)
    end = f"the ranks wait for each other since more than launch.timeout={timeout:g} s ({each})"
    return places[0].number, end


def _named(place: _Place, timeout: float) -> tuple[int, str]:
    calls = [f"  {line}" for line in place.stack]
    if calls:
        calls.insert(0, f"where rank {place.number} is (most recent call first):")
    end = (
        f"rank {place.number} hangs: {place.text}; "
        f"the others waited for it for more than launch.timeout={timeout:g} s"
    )
    return place.number, "\n".join([*calls, end])
