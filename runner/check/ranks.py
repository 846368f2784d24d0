"""Messages of the check between ranks, apart from the code under test; ranks that are missing."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runner.config.notation import ranks_as_text
from runner.gradients.objects import gather_objects

# The default group, and two groups that were made for it: for checks, and for their watches.
_groups: list[Any] = []
_LEAST_GRACE = 2.0  # seconds that watches have to tell each other where their ranks are


class MissingRanksError(RuntimeError):
    """Some ranks did not come to a point that others have reached."""


class Ranks:
    """All ranks of the default process group, joined by gloo groups of their own.

    A rank that waits in a collective of the code under test does not take a message of the check
    for it. Without ``torch.distributed`` there is one rank and no message.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.rank = 0
        self.size = 1
        self.group: Any = None
        self.started = dist.is_available() and dist.is_initialized()
        if self.started and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            world = dist.group.WORLD
            if not _groups or _groups[0] is not world:
                _groups[:] = [world, dist.new_group(backend="gloo"), dist.new_group(backend="gloo")]
            self.group = _groups[1]

    def gather(self, value: Any, seconds: float | None = None) -> list[Any]:
        """Return the value of each rank; a collective.

        Raises:
            MissingRanksError: a rank did not come within ``seconds``, by default the time-out.
        """
        if self.group is None:
            return [value]
        return gathered(value, self.group, self.timeout if seconds is None else seconds)

    def grace(self) -> float:
        """Return the seconds that are left to watches once the time-out is over."""
        return max(_LEAST_GRACE, min(30.0, self.timeout / 2))


def gathered(value: Any, group: Any, seconds: float) -> list[Any]:
    """Return the value of each rank of ``group``."""
    ready = [torch.zeros(1) for _ in range(group.size())]
    work = dist.all_gather(ready, torch.zeros(1), group=group, async_op=True)
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise MissingRanksError(f"not all ranks came within {seconds:.3g} s") from error
    return gather_objects(value, group)


class Watch:
    """Tells all ranks where each one is, once the clipping takes too long."""

    def __init__(self, ranks: Ranks) -> None:
        self.state = ""  # empty while this rank is inside of the clipping
        self.places: dict[int, str] = {}  # by rank, once the time was over
        self._ranks = ranks
        self._thread = threading.get_ident()
        self._started = 0.0
        self._timer = threading.Timer(ranks.timeout, self._look)
        self._timer.daemon = True

    def start(self) -> None:
        self._started = time.monotonic()
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()

    def left(self) -> float:
        """Return the seconds until all ranks know of each other, if any hangs."""
        until = self._started + self._ranks.timeout + self._ranks.grace()
        return max(1.0, until - time.monotonic())

    def _look(self) -> None:
        frame = sys._current_frames().get(self._thread)
        place = self.state or f"waits in {place_of(traceback.extract_stack(frame))}"
        self.places = {self._ranks.rank: place}
        if self._ranks.group is not None:
            try:
                places = gathered(place, _groups[2], self._ranks.grace())
                self.places = dict(enumerate(places))
            except (RuntimeError, ValueError):
                pass  # ranks left this check, or the process group; what is known stays
        if not self.state:
            text = f"the clipping takes over {self._ranks.timeout:g} s: {in_words(self.places)}\n"
            sys.stderr.write(f"check_clipping: {text}")
            sys.stderr.flush()


def in_words(places: Mapping[int, str]) -> str:
    """Return where ranks are, those in one place together."""
    by_place: dict[str, list[int]] = {}
    for rank, place in places.items():
        by_place.setdefault(place, []).append(rank)
    return "; ".join(f"{ranks_as_text(ranks)} {place}" for place, ranks in by_place.items())


def place_of(stack: traceback.StackSummary) -> str:
    """Return the call that a stack waits in: the last one outside of torch, and what it calls."""
    outside = [number for number, frame in enumerate(stack) if "/torch/" not in frame.filename]
    if not outside:
        return "an unknown place"
    caller = stack[outside[-1]]
    inner = stack[outside[-1] + 1 :]
    names = [frame.name for frame in inner if frame.name not in ("wrapper", "inner")]
    called = f"{names[0]}, called " if names else ""
    line = f" ({caller.line})" if caller.line else ""
    return f"{called}at {caller.filename}:{caller.lineno}{line}"
