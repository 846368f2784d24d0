"""How numbers read on the page."""

from __future__ import annotations

import math


def figure(value: float | None, digits: int = 4) -> str:
    """``value`` to so many significant digits; ``–`` where there is none.

    Non-finite numbers are named (``NaN``, ``∞``), never shown as a gap.
    """
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    text = f"{value:.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", "−")


def percent(share: float | None) -> str:
    """A share in 0..1 as a percentage; ends are exact: 0 % is none, 100 % is all."""
    if share is None or not math.isfinite(share):
        return figure(share)
    if 0 < share < 0.001:
        return "< 0.1\u00a0%"
    if 0.999 < share < 1:
        return "> 99.9\u00a0%"
    return f"{figure(100 * share, 3)}\u00a0%"


def value_text(value: object) -> str:
    """A value of a configuration, as one would type it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return repr(value) if 1e-4 <= abs(value) < 1e6 else f"{value:g}"
        case list() | tuple():
            return "[" + ",".join(value_text(item) for item in value) + "]"
        case _:
            return str(value)


def plural(count: int, noun: str) -> str:
    """A count of things: ``1 run``, ``2 runs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
