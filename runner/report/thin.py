"""Draw a curve with fewer points: buckets that keep their lowest and highest value.

A mean, or every n-th point, would lose the single steps at which a norm spikes. A curve of 10,000
steps that is 500 pixels wide shows the range of about 20 steps in each column of pixels; two points
a bucket draw the same range.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from runner.report.series import Floats

SMOOTHING = 0.05
"""Curves are means over this share of a run until a reader chooses another one."""


def kept(values: Floats, buckets: int) -> NDArray[np.intp]:
    """Return the indices of the points to draw."""
    n = len(values)
    if n <= 2 * buckets:
        return np.arange(n)
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    chosen = {0, n - 1}
    for start, end in pairwise(np.linspace(0, n, buckets + 1).astype(int)):
        at = slice(start, end)
        chosen |= {start + low[at].argmin(), start + high[at].argmax()}
        if not finite[at].all():
            chosen.add(start + finite[at].argmin())
    return np.asarray(sorted(chosen), dtype=np.intp)


def means(
    steps: Floats, values: Floats, buckets: int, log: bool = False
) -> tuple[Floats, Floats, Floats]:
    """Return the middle step, the mean and the highest value of each of at most ``buckets``
    ranges.
    """
    n = len(values)
    starts = np.linspace(0, n, min(n, buckets), endpoint=False).astype(np.intp)
    with np.errstate(invalid="ignore", divide="ignore"):
        of = np.log(values) if log else values
        finite = np.isfinite(of)
        counts = np.add.reduceat(finite.astype(float), starts)
        mean = np.add.reduceat(np.where(finite, of, 0.0), starts) / counts
        highest = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    middle = (starts + np.append(starts[1:], n) - 1) // 2
    return steps[middle], np.exp(mean) if log else mean, highest


def rolling_mean(values: Floats, width: int, log: bool = False) -> Floats:
    """Return the mean of the finite values among the ``width`` around each; NaN at gaps."""
    if width <= 1 or not len(values):
        return values
    with np.errstate(invalid="ignore", divide="ignore"):
        of = np.log(values) if log else values
    finite = np.isfinite(of)
    held = slice(width // 2, width // 2 + len(values))  # windows around the middle of each value
    sums = np.convolve(np.where(finite, of, 0.0), np.ones(width))[held]
    counts = np.convolve(finite, np.ones(width))[held]
    # A value that is not finite stays a gap in the curve.
    mean = np.where(finite, sums / np.maximum(counts, 1), np.nan)
    return np.exp(mean) if log else mean
