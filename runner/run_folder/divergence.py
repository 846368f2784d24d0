"""Whether a training diverged: one rule for the run that records it and for readers of its rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

ENOUGH = 20  # losses below which only a loss that is not finite counts
SHARE = 0.75  # of the last losses that have to be lost


def diverged_from(losses: ArrayLike) -> int | None:
    """Return the position from which training losses are lost until their end, or None.

    A loss is lost if it is not finite, or above the upper quartile of the first tenth. A training
    diverged if three quarters of the losses of its last tenth are lost.
    """
    values = np.asarray(losses, dtype=np.float64)
    tenth = max(1, len(values) // 10)
    lost = ~np.isfinite(values)
    first = values[:tenth][~lost[:tenth]]
    if len(values) >= ENOUGH and len(first):
        lost |= values > np.quantile(first, 0.75)
    if not len(values) or lost[-tenth:].mean() < SHARE:
        return None
    # The start of the range in which lost steps outnumber the others the most.
    surplus = np.cumsum(np.where(lost, 1, -1)[::-1])[::-1]
    return int(np.argmax(surplus))
