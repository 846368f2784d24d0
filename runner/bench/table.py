"""What a benchmark is asked for, and the rows of its tables as text and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.bench.pairs import Spread, Times, added, ratio

WIDTH = 62
"""Characters of the column that says what was measured."""

HEADER = f"{'':<{WIDTH}}  median   quartiles        limit         medians in ms"


@dataclass(frozen=True)
class Setting:
    """What a benchmark is asked for."""

    folder: Path
    quick: bool = False
    peers: bool = False
    device: str = "cpu"
    rounds: int | None = None

    def pairs(self, usual: int = 15) -> int:
        """Return the number of rounds of a row that has ``usual`` ones."""
        return self.rounds or (3 if self.quick else usual)


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    what: str
    value: Spread
    limit: float | None = None
    unit: str = ""
    ms: Mapping[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the row as JSON-like containers."""
        unit = self.unit or "ratio"
        own = {"what": self.what, "unit": unit, "limit": self.limit, "ms": dict(self.ms)}
        return own | self.value._asdict()

    def line(self) -> str:
        """Return the row as one line, below :data:`HEADER`."""
        value, limit = self.value, ""
        if self.limit is not None:
            missed = value.median > self.limit
            limit = f"{_shown(self.limit, self.unit)}{' missed' if missed else ''}"
        between = f"{_shown(value.low, self.unit)} - {_shown(value.high, self.unit)}"
        sides = "  ".join(f"{name} {_shown(median, '')}" for name, median in self.ms.items())
        median = _shown(value.median, self.unit)
        unit = "" if self.unit == "error" else self.unit
        line = f"{self.what:<{WIDTH}} {median:>7} {unit:<4}{between:<15}  {limit:<12}  {sides}"
        return line.rstrip()


def compared(
    what: str,
    times: Times,
    ours: str,
    base: str,
    limit: float | None = None,
    *,
    bare: str | None = None,
    steps: int = 1,
) -> Row:
    """Return the row with the ratio of the times of the sides ``ours`` and ``base``."""
    if bare is None:
        spread = ratio(times[ours], times[base])
    else:
        spread = added(times[ours], times[base], times[bare])
    sides = [name for name in (bare, base, ours) if name is not None]
    ms = {name: 1e3 * statistics.median(times[name]) / steps for name in sides}
    return Row(what, spread, limit, ms=ms)


def _shown(value: float, unit: str) -> str:
    if unit == "error":
        return f"{value:.0e}"
    return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.{2 if abs(value) < 100 else 0}f}"
