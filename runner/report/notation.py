"""Numbers as text on the page: with a minus sign, and with spaces that do not break."""

from __future__ import annotations

import math

from runner.config import notation


def rounded(value: float | None, digits: int = 4) -> str:
    """Format ``value`` with so many significant digits; ``–`` for None, ``NaN`` and ``∞`` by
    name.
    """
    if value is None:
        return "–"
    text = notation.rounded(value, digits)
    return text.replace("nan", "NaN").replace("inf", "∞").replace("-", "−")


def typed(value: float, digits: int = 4) -> str:
    """Format a value of an override, which is copied into a command: with a plain minus sign."""
    return notation.rounded(value, digits)


def signed(value: float) -> str:
    """Format a difference with its sign and three significant digits."""
    return f"{'+' if value > 0 else ''}{rounded(value, 3)}"


def percent(share: float | None) -> str:
    """Format a share in 0..1 as a percentage, see :func:`runner.config.notation.percent`."""
    if share is None or not math.isfinite(share):
        return rounded(share)
    return notation.percent(share).replace(" ", "\u00a0")


def plural(count: int, noun: str) -> str:
    """Format a count of things: ``1 run``, ``1,234 runs``."""
    return notation.plural(count, noun, ",")
