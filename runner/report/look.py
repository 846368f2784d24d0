"""How things look on the page: numbers as text, and colours.

Values of a number that was swept go from dark to bright as they rise; choices have eight hues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from runner.config import notation

SMOOTHING = 0.05  # curves are means over this share of a run

# The map viridis of Smith and van der Walt, matplotlib, CC0
_VIRIDIS = np.frombuffer(
    bytes.fromhex("440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725"), np.uint8
).reshape(-1, 3)
# The parts of it whose contrast is at least 3:1 on white, and on the dark screen
_BRIGHTEST = 0.58
_DARKEST = 0.38
_EVENLY = 0.82  # steps are wider at the dark end, whose colours are closer to each other
_LEVELS = 96  # parts of viridis, so that each colour has one counterpart

# Contrast of at least 3:1 on both backgrounds, and far apart for the colour-blind
HUES = ("#2f78d0", "#c9620c", "#2b8f48", "#c9509a", "#8a63d2", "#9a6b3a", "#1a8f96", "#d24a4a")

# Text, what has no place in the order of thresholds, grid lines, background
INK, NEUTRAL, RULE, PAPER = "#1c2430", "#5b6470", "#e3e7ec", "#ffffff"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun, and commas between thousands."""
    return notation.plural(count, noun, form=",")


def rounded(value: float | None, digits: int = 4) -> str:
    """Format a number with signs of typography; a dash for None."""
    if value is None:
        return "–"
    text = notation.rounded(value, digits)
    return text.replace("nan", "NaN").replace("inf", "∞").replace("-", "−")


def signed(value: float, digits: int = 3) -> str:
    """Format a number with its sign."""
    return f"{'+' if value > 0 else ''}{rounded(value, digits)}"


def joined(names: Sequence[str], most: int) -> str:
    """Return names as a list, at most ``most`` of them: ``a, b and c``."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), *names[-1:]])


def percent(share: float | None) -> str:
    """Format a share as a percentage; a dash for None."""
    if share is None or not math.isfinite(share):
        return rounded(share)
    return notation.percent(share).replace(" ", "\u00a0")


def viridis(place: float) -> str:
    """Return the color at a place from 0 to 1 of the map viridis, as ``#rrggbb``."""
    places = np.linspace(0, 1, len(_VIRIDIS))
    return f"#{bytes(round(np.interp(place, places, channel)) for channel in _VIRIDIS.T).hex()}"


def ordered(count: int) -> list[str]:
    """Return ``count`` colours from dark to bright, about equally far apart for the eye."""
    places = [0.3]
    if count > 1:
        places = [_BRIGHTEST * (i / (count - 1)) ** _EVENLY for i in range(count)]
    return [viridis(round(place * _LEVELS) / _LEVELS) for place in places]


def on_dark() -> dict[str, str]:
    """Return the colour that takes the place of each on a dark screen."""
    brighter = (1 - _DARKEST) / _BRIGHTEST
    places = [i / _LEVELS for i in range(round(_BRIGHTEST * _LEVELS) + 1)]
    of_page = {INK: "#e4e8ed", NEUTRAL: "#9ba5b2", RULE: "#2c343f", PAPER: "#14181e"}
    of_curves = {viridis(place): viridis(_DARKEST + place * brighter) for place in places}
    return of_page | of_curves
