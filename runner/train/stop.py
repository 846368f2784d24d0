"""A request to stop: noted when a signal arrives, read by the training loop between two steps."""

from __future__ import annotations

_number = 0
_polled = False


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
    """Return whether a training loop reads the request."""
    return _polled


def reset() -> int:
    """End the time in which signals are noted only; return the number of one that was noted."""
    global _number, _polled
    _polled = False
    number, _number = _number, 0
    return number
