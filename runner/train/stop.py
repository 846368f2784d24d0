"""The request to stop and the heartbeat of a rank, without torch, for signals and watchers."""

from __future__ import annotations

begun = 0  # microbatches that this rank has begun: one that begins none hangs
_number = 0
_deferred = False


class Stopped(Exception):
    """Training ended after a step because a signal asked for it; the run can be resumed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


def beat() -> None:
    """Note that a microbatch begins; what watches for ranks that hang counts them."""
    global begun
    begun += 1


def requested() -> int:
    """Return the number of the signal that asked this process to stop; 0 for none."""
    return _number


def defer() -> None:
    """From now on signals are noted, until :func:`reset`; before, they raise an exception."""
    global _deferred
    _deferred = True


def request(number: int) -> None:
    """Ask this process to stop after its current step; the first request holds."""
    global _number
    _number = _number or number


def is_deferred() -> bool:
    """Return whether signals are noted only."""
    return _deferred


def reset() -> int:
    """End the time in which signals are noted only; return the number of one that was noted."""
    global _number, _deferred
    number = _number
    _number = 0
    _deferred = False
    return number
