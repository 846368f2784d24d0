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
class Distribution:
    """Distribution of a value over steps; NaN if no value is finite."""

    steps: int
    nonfinite: int
    mean: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Histogram:
    """Histogram of the values of elements or units, with bins of equal width in log10."""

    counts: Sequence[float]
    total: float
    lowest: float
    highest: float

    @property
    def nonzero(self) -> float:
        """Number of elements or units that are not zero."""
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
        """Return the edges of the bins, and the number of elements or units above each edge."""
        edges = np.linspace(self.lowest, self.highest, len(self.counts) + 1)
        return edges, np.append(np.cumsum(np.asarray(self.counts)[::-1])[::-1], 0.0)


@dataclass(frozen=True)
class Suggestion:
    """Thresholds to try."""

    start: float
    low: float
    high: float


def warm_up(steps: int, asked: int | None) -> int:
    """Return the number of warm-up steps: ``asked``, or a tenth of the steps."""
    return steps // 10 if asked is None else min(asked, steps - 1)


def distribution(values: Iterable[float]) -> Distribution:
    """Return the distribution of ``values``, one for each step."""
    every = np.asarray(list(values), dtype=np.float64)
    finite = every[np.isfinite(every)]
    nonfinite = len(every) - len(finite)
    if not finite.size:
        finite = np.array([math.nan])
    percentiles = {f"p{point}": float(np.percentile(finite, point)) for point in POINTS}
    return Distribution(
        len(every), nonfinite, mean=float(finite.mean()), max=float(finite.max()), **percentiles
    )


def suggest(measured: Distribution) -> Suggestion | None:
    """Suggest thresholds, to three digits; None if no norm was finite or all were zero."""
    found = [_rounded(x) for x in (measured.p90, measured.mean / 2, measured.mean * 10)]
    return Suggestion(*found) if all(math.isfinite(x) and x > 0 for x in found) else None


def suggest_by_parts(shares: Sequence[float], parts: Histogram) -> Suggestion | None:
    """Return thresholds to three digits for a mode that clips elements, units or tensors."""
    found = [_rounded(parts.largest(share)) for share in shares]
    return Suggestion(*found) if all(x > 0 for x in found) else None


def would_clip(peaks: Sequence[float], threshold: float) -> float:
    """Return the share of the steps that ``threshold`` would have clipped."""
    return sum(peak > threshold for peak in peaks) / max(len(peaks), 1)


def candidates(
    studied: Iterable[float], suggestion: Suggestion | None, also: Iterable[float | None] = ()
) -> list[float]:
    """Return the thresholds to compare, rising."""
    listed = [*studied, *(x for x in also if x is not None)]
    if suggestion is not None:
        listed += [suggestion.start, suggestion.low, suggestion.high]
    return sorted(set(listed))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
