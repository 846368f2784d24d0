"""The request to stop and the heartbeat of a rank, without torch, for signals and watchers."""

from __future__ import annotations

begun = 0  # microbatches that this rank has begun: one that begins none hangs
_number = 0
_polled = False


class Stopped(Exception):
    """Training ended after a step because a signal asked for it; the run can be resumed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


def beat() -> None:
    global begun
    begun += 1


def requested() -> int:
    """Return the number of the signal that asked this process to stop; 0 for none."""
    global _polled
    _polled = True
    return _number


def request(number: int) -> None:
    """Ask this process to stop after its current step; the first request holds."""
    global _number
    _number = _number or number


def is_polled() -> bool:
    return _polled


def reset() -> int:
    """End the time in which signals are noted only; return the number of one that was noted."""
    global _number, _polled
    number, _number, _polled = _number, 0, False
    return number
