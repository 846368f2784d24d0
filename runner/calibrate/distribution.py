"""Distributions of gradients, and the thresholds that they suggest.

Thresholds of a mode that clips whole steps follow from the norms of the steps. Those of a mode that
clips elements or units follow from the elements or units of all steps, because the largest of them
says nothing about the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

POINTS = (50, 75, 90, 95, 99)


@dataclass(frozen=True)
class Histogram:
    """Histogram of the values of elements or units, with bins of equal width in log10."""

    counts: Sequence[float]
    total: float
    lowest: float
    highest: float

    @property
    def nonzero(self) -> float:
        return math.fsum(self.counts)

    def share_above(self, threshold: float) -> float:
        """Return the share of all elements or units, including zeros, above ``threshold``."""
        edges, above = self._above()
        return float(np.interp(math.log10(threshold), edges, above)) / max(self.total, 1.0)

    def largest(self, share: float) -> float:
        """Return the value that ``share`` of the nonzero ones exceed; NaN if all are zero."""
        edges, above = self._above()
        if not above[0]:
            return math.nan
        # np.interp needs increasing numbers.
        return float(10 ** np.interp(-share * above[0], -above, edges))

    def _above(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        edges = np.linspace(self.lowest, self.highest, len(self.counts) + 1)
        return edges, np.append(np.cumsum(np.asarray(self.counts)[::-1])[::-1], 0.0)


def warm_up(steps: int, asked: int | None) -> int:
    return steps // 10 if asked is None else min(asked, steps - 1)


def distribution(values: Iterable[float]) -> dict[str, float]:
    """Return the distribution of a value over steps; NaN if no value is finite."""
    every = np.asarray(list(values), dtype=np.float64)
    finite = every[np.isfinite(every)]
    found = {"steps": len(every), "nonfinite": len(every) - len(finite)}
    if not finite.size:
        finite = np.array([math.nan])
    points = {f"p{point}": float(np.percentile(finite, point)) for point in POINTS}
    return {**found, "mean": float(finite.mean()), **points, "max": float(finite.max())}


def suggest(start: float, low: float, high: float) -> dict[str, float] | None:
    """Return thresholds with three digits; None if no gradient was finite and above 0."""
    found = {"start": start, "low": low, "high": high}
    if not all(math.isfinite(x) and x > 0 for x in found.values()):
        return None
    return {name: float(f"{x:.3g}") for name, x in found.items()}


def would_clip(peaks: Sequence[float], threshold: float) -> float:
    return sum(peak > threshold for peak in peaks) / max(len(peaks), 1)
