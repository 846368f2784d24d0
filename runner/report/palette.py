"""Colours in an order that every reader sees: viridis, dark to bright as thresholds rise.

Source: Smith and van der Walt, matplotlib's viridis (CC0). Its bright end is left out because
yellow lines do not show on white paper.
"""

from __future__ import annotations

_VIRIDIS = (
    (0x44, 0x01, 0x54),
    (0x47, 0x2D, 0x7B),
    (0x3B, 0x52, 0x8B),
    (0x2C, 0x72, 0x8E),
    (0x21, 0x91, 0x8C),
    (0x28, 0xAE, 0x80),
    (0x5E, 0xC9, 0x62),
    (0xAD, 0xDC, 0x30),
    (0xFD, 0xE7, 0x25),
)
_BRIGHTEST = 0.72

# Colour of runs without clipping, which have no place in the order of thresholds.
NEUTRAL = "#5b6470"

# Dashes of the curves of a mode, by what it clips, for charts of several modes.
DASHES = {None: "", "steps": "", "elements": "6 3", "units": "2 2.5"}
OTHER_DASH = "8 3 2 3"


def viridis(at: float) -> str:
    """Return the colour at a place in 0..1 as ``#rrggbb``."""
    x = min(max(at, 0.0), 1.0) * (len(_VIRIDIS) - 1)
    i = min(int(x), len(_VIRIDIS) - 2)
    parts = (
        round(a + (b - a) * (x - i)) for a, b in zip(_VIRIDIS[i], _VIRIDIS[i + 1], strict=True)
    )
    return "#" + "".join(f"{part:02x}" for part in parts)


def ordered(count: int) -> list[str]:
    """Return ``count`` colours from dark to bright, as far apart as possible."""
    if count == 1:
        return [viridis(0.3)]
    return [viridis(_BRIGHTEST * i / (count - 1)) for i in range(count)]
