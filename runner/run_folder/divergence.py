"""Whether a training diverged: one rule for the run that records it and for readers of its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

ENOUGH = 20  # losses below which only a loss that is not finite counts
SHARE = 0.75  # of the last losses that have to be lost


def diverged_from(losses: Sequence[float]) -> int | None:
    """Return the position from which training losses are lost until their end, or None.

    A loss is lost if it is not finite, or above the upper quartile of the first tenth. A training
    diverged if three quarters of the losses of its last tenth are lost.
    """
    if not len(losses):
        return None
    tenth = max(1, len(losses) // 10)
    first = sorted(loss for loss in losses[:tenth] if math.isfinite(loss))
    highest = quantile(first, 0.75) if len(losses) >= ENOUGH and first else math.inf
    lost = [not math.isfinite(loss) or loss > highest for loss in losses]
    if sum(lost[-tenth:]) / tenth < SHARE:
        return None
    # The start of the range in which lost steps outnumber the others the most.
    surplus = 0
    largest = -math.inf
    start = 0
    for position in reversed(range(len(lost))):
        surplus += 1 if lost[position] else -1
        if surplus >= largest:
            largest = surplus
            start = position
    return start


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of values in ascending order, by linear interpolation as NumPy's."""
    place = share * (len(ordered) - 1)
    lower = math.floor(place)
    upper = min(lower + 1, len(ordered) - 1)
    weight = place - lower
    low = float(ordered[lower])
    high = float(ordered[upper])
    if weight >= 0.5:
        return high - (high - low) * (1 - weight)
    return low + (high - low) * weight
