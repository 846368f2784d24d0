"""Wait for work of a process as long as it makes progress, however slow the machine is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.5
"""Seconds between two looks at the process."""


def wait_while_working(
    process: int,
    has_ended: Callable[[float], bool],
    stalled: float,
    timeout: float,
    heard: Callable[[], int] = lambda: 0,
    time_left: Callable[[], float] = lambda: math.inf,
) -> bool:
    """Wait until the work of a process has ended."""
    now = time.monotonic()
    until, since = now + timeout, now
    before: object = None
    while True:
        if has_ended(max(0.0, min(POLL_SECONDS, until - now))):
            return True
        now = time.monotonic()
        times = cpu_times(process)
        mark = heard(), times
        if mark != before or None in times.values():
            before, since = mark, now
        if now >= until or now - since >= stalled or time_left() <= 0:
            return False


def cpu_times(process: int) -> dict[int, int | None]:
    """Return the CPU time that a process and each of its descendants used, in ticks of the
    kernel.
    """
    times: dict[int, int | None] = {}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The fields follow the command name, which may itself hold blanks and parentheses.
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:  # it has just ended
            continue
        state, parent, *fields = stat.rpartition(")")[2].split()
        pid = int(entry.name)
        children.setdefault(int(parent), []).append(pid)
        times[pid] = None if state in "RD" else int(fields[9]) + int(fields[10])
    found, left = {process: times.get(process)}, [process]
    while left:
        for child in children.get(left.pop(), ()):
            found[child] = times[child]
            left.append(child)
    return found
