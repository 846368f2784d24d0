"""Differences between the settings of a sweep, and what they are worth.

Runs of equal seed read the same samples and start from the same weights, so settings are compared
seed by seed, by the paired t test. If the reference is the best of the same runs, luck made it look
better than it is: K - 1 intervals were selected among K (K - 1) / 2 pairs, so each has the level
1 - 0.05 · 2 / K (Benjamini and Yekutieli 2005, section 4), and p is corrected by Holm's method
(1979) for all pairs. Against a baseline that was named beforehand the level is 0.95, and Holm's
method counts K - 1.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

import numpy as np

LEVEL = 0.95
POWER = 0.8  # probability with which a difference that "would be seen" has to be found
MOST_SEEDS = 64  # that are proposed
Scores = Mapping[Hashable, float]  # of the seeds of a setting


@dataclass(frozen=True)
class Difference:
    """Score of a setting minus the reference's over common seeds; None where fewer than two are."""

    value: float
    seeds: int
    low: float | None = None
    high: float | None = None
    p: float | None = None
    corrected: float | None = None
    visible: float | None = None
    needed: int | None = None

    @property
    def seen(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def compare(settings: Sequence[Scores], reference: int, chosen: bool) -> dict[int, Difference]:
    """Compare settings with one of them, which was chosen by the same scores or beforehand."""
    whole = {i: of for i, of in enumerate(settings) if of and all(map(math.isfinite, of.values()))}
    base = whole.pop(reference, None)
    if base is None:
        return {}
    count = len(whole) + 1
    level = 1 - (1 - LEVEL) * 2 / count if chosen else LEVEL
    found = {position: _difference(of, base, level) for position, of in whole.items()}
    values = {position: one.p for position, one in found.items() if one.p is not None}
    corrected = holm(values, count * (count - 1) // 2 if chosen else len(values))
    return {place: replace(one, corrected=corrected.get(place)) for place, one in found.items()}


def holm(values: Mapping[int, float], tests: int) -> dict[int, float]:
    order = sorted(values, key=values.__getitem__)
    steps = (min(1.0, values[position] * (tests - rank)) for rank, position in enumerate(order))
    return dict(zip(order, accumulate(steps, max), strict=True))


def _difference(one: Scores, other: Scores, level: float) -> Difference:
    """Return the difference of two settings, with an interval of ``level``."""
    pairs = np.array([one[seed] - other[seed] for seed in one if seed in other])
    if not len(pairs):
        return Difference(fmean(one.values()) - fmean(other.values()), 0)
    found = Difference(float(pairs.mean()), len(pairs))
    if found.seeds == 1:
        return found
    from scipy import special  # imported only for a page that compares several seeds

    error, freedom = float(pairs.std(ddof=1)) / math.sqrt(found.seeds), found.seeds - 1

    def limit(seeds: int) -> float:
        return float(special.stdtrit(seeds - 1, (1 + level) / 2))

    def smallest(seeds: int) -> float:
        errors = special.nctdtrinc(seeds - 1, 1 - POWER, limit(seeds))
        return float(errors) * error * math.sqrt(found.seeds / seeds)

    half, size = limit(found.seeds) * error, abs(found.value)
    more = range(found.seeds + 1, MOST_SEEDS + 1) if 0 < size <= half else ()
    distance = size / error if error else math.inf if size else 0.0
    return replace(
        found,
        low=found.value - half,
        high=found.value + half,
        p=2 * float(special.stdtr(freedom, -distance)),
        visible=smallest(found.seeds),
        needed=next((seeds for seeds in more if smallest(seeds) <= size), None),
    )
