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


def kept(values: Floats, buckets: int) -> NDArray[np.intp]:
    """Return the indices of the points to draw.

    Args:
        values: values in order of steps, shape (n,); may hold NaN and infinities.
        buckets: number of ranges of neighbouring values; two or three points of each remain.

    Returns:
        Rising indices: the first and last point, the lowest and highest finite value of each
        bucket, and the first that is not finite, so that a gap stays a gap. All indices if a
        bucket has at most two points on average.
    """
    n = len(values)
    if n <= 2 * buckets:
        return np.arange(n)
    edges = np.linspace(0, n, buckets + 1).astype(np.intp)
    finite = np.isfinite(values)
    chosen = [0, n - 1]
    low = np.where(finite, values, np.inf)
    high = np.where(finite, values, -np.inf)
    whole = bool(finite.all())
    for start, end in pairwise(edges):
        chosen += [int(start + low[start:end].argmin()), int(start + high[start:end].argmax())]
        if not whole and not finite[start:end].all():
            chosen.append(int(start + finite[start:end].argmin()))
    return np.unique(np.asarray(chosen, dtype=np.intp))


def rolling_mean(values: Floats, width: int) -> Floats:
    """Return the mean of the finite values among the ``width`` around each; NaN at gaps.

    Args:
        values: values to average, shape (n,).
        width: number of values in a window, at least 1; windows are shorter at both ends.
    """
    if width <= 1 or not len(values):
        return values
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    at = np.arange(len(values))
    start = np.maximum(at - (width - 1) // 2, 0)
    end = np.minimum(at + width // 2 + 1, len(values))
    held = counts[end] - counts[start]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (sums[end] - sums[start]) / held
    # A value that is not finite stays a gap in the curve.
    return np.where(finite & (held > 0), mean, np.nan)
