"""What gradients look like, and which thresholds that suggests. Pure functions.

A mode that clips whole steps is judged by the norms of the steps; one that clips elements or units
by all elements or units of all steps, because the largest of them says nothing about the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

POINTS = (50, 75, 90, 95, 99)

CLIPPED = {"adaptive": (0.2, 0.5, 0.05), "value": (0.01, 0.1, 0.001)}
"""Shares of the units, or elements, that the start and the ends of the range clip, by mode.

No paper gives a rule. On ordinary models the studied thresholds of adaptive clipping (0.01 to 0.16)
clip from a twentieth to more than half of the units. Clamping elements turns the gradient, so fewer
of them are clipped."""

STUDIED = {
    "norm": (0.1, 0.25, 1.0, 2.0),
    "value": (0.1, 0.25, 1.0, 2.0),
    "adaptive": (0.01, 0.02, 0.04, 0.08, 0.16),
}
"""Thresholds that publications use, by mode; those of ``value`` are a grid and no more."""


@dataclass(frozen=True)
class Distribution:
    """A stream of figures, one a step.

    Attributes:
        steps: how many.
        nonfinite: how many of them are NaN or inf; all the rest is of the finite ones.
        mean: NaN, as all below, where none is finite.
        p50: the median; the further percentiles by linear interpolation too.
        max: the largest.
    """

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
    """Elements or units by what is compared with λ, on bins of equal width in log10.

    Attributes:
        counts: of each bin.
        total: of everything, so also of zeros, which no bin holds.
        lowest, highest: log10 of the outer edges.
    """

    counts: Sequence[float]
    total: float
    lowest: float
    highest: float

    @property
    def nonzero(self) -> float:
        """How many are not zero: units of an embedding, say, whose token was in the batch."""
        return math.fsum(self.counts)

    def share_above(self, threshold: float) -> float:
        """Share of everything, zeros included, that is above ``threshold``."""
        edges, above = self._above()
        return float(np.interp(math.log10(threshold), edges, above)) / max(self.total, 1.0)

    def largest(self, share: float) -> float:
        """The value above which ``share`` of those that are not zero lie; NaN if all are zero."""
        edges, above = self._above()
        if not above[0]:
            return math.nan
        # np.interp wants rising numbers.
        return float(10 ** np.interp(-share * above[0], -above, edges))

    def _above(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The edges of the bins, and how many are above each."""
        edges = np.linspace(self.lowest, self.highest, len(self.counts) + 1)
        return edges, np.append(np.cumsum(np.asarray(self.counts)[::-1])[::-1], 0.0)


@dataclass(frozen=True)
class Suggestion:
    """Thresholds to try.

    Attributes:
        start: to begin with: it clips the largest tenth of the steps, or the largest units.
        low: lower end of a range worth a sweep.
        high: its upper end.
    """

    start: float
    low: float
    high: float


def warm_up(steps: int, asked: int | None) -> int:
    """How many of the first steps are described apart: as asked, or a tenth."""
    return steps // 10 if asked is None else min(asked, steps - 1)


def distribution(figures: Iterable[float]) -> Distribution:
    """Describe ``figures``, one a step."""
    every = np.asarray(list(figures), dtype=np.float64)
    finite = every[np.isfinite(every)]
    if not finite.size:
        finite = np.array([math.nan])
    p50, p75, p90, p95, p99 = map(float, np.percentile(finite, POINTS))
    return Distribution(
        steps=len(every),
        nonfinite=int(np.count_nonzero(~np.isfinite(every))),
        mean=float(finite.mean()),
        p50=p50,
        p75=p75,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(finite.max()),
    )


def suggest(measured: Distribution) -> Suggestion | None:
    """Thresholds to three digits; None where no gradient was finite or all were zero.

    Start: 90th percentile (Deep Learning Tuning Playbook). Range: half to ten times the mean
    (Pascanu et al. 2013, section 3.2).
    """
    found = [_rounded(x) for x in (measured.p90, measured.mean / 2, measured.mean * 10)]
    return Suggestion(*found) if all(math.isfinite(x) and x > 0 for x in found) else None


def suggest_by_parts(mode: str, parts: Histogram) -> Suggestion | None:
    """Thresholds to three digits for a mode that clips elements or units; None if all are zero.

    The thresholds are those that clip the shares of `CLIPPED`.
    """
    found = [_rounded(parts.largest(share)) for share in CLIPPED[mode]]
    return Suggestion(*found) if all(x > 0 for x in found) else None


def would_clip(peaks: Sequence[float], threshold: float) -> float:
    """Share of the steps that ``threshold`` would have clipped.

    The same figure as ``clip/what_if/<λ>`` at the end of an unclipped run: a step that was skipped
    (NaN) counts as a step, and not as a clipped one.

    Args:
        peaks: what the mode compares with its threshold, one figure a step.
        threshold: λ.
    """
    return sum(peak > threshold for peak in peaks) / max(len(peaks), 1)


def candidates(
    mode: str, suggestion: Suggestion | None, also: Iterable[float | None] = ()
) -> list[float]:
    """Thresholds whose share is worth telling, rising: studied ones, suggested ones, and ``also``.

    Args:
        mode: ``norm``, ``value`` or ``adaptive``.
        suggestion: from :func:`suggest`.
        also: further ones, such as the request's own; None among them is left out.
    """
    listed = [*STUDIED.get(mode, STUDIED["norm"]), *(x for x in also if x is not None)]
    if suggestion is not None:
        listed += [suggestion.start, suggestion.low, suggestion.high]
    return sorted(set(listed))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
