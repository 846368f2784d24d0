"""What a stream of gradient norms looks like, and which thresholds it suggests. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

POINTS = (50, 75, 90, 95, 99)

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
class Suggestion:
    """Thresholds to try.

    Attributes:
        start: to begin with, the 90th percentile: it holds the largest tenth of the steps.
        low: half of the mean.
        high: ten times the mean.
    """

    start: float
    low: float
    high: float


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
