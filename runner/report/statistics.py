"""Differences between the settings of a sweep, and what they are worth.

**Pairs.** Runs of equal seed read the same samples in the same order and start from the same
weights, so a setting is compared with the reference seed by seed: by the paired t test, and beside
it by the exact sign-flip test, which assumes nothing of the distribution. Settings that share fewer
than two seeds are compared by Welch's unpaired t test.

**Choice of the best.** If the reference is the best of the same runs, luck made it look better than
it is. The K - 1 intervals shown were selected among K (K - 1) / 2 pairs, so each has the level
1 - 0.05 · 2 / K: then at least 95 % of the intervals on such pages hold the true difference
(Benjamini and Yekutieli 2005, section 4). p is corrected by Holm's method (1979) for all pairs.
Against a baseline that was named beforehand nothing was selected: the level is 0.95, and Holm's
method counts K - 1. A setting is called the winner only if all its intervals lie on one side of 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

import numpy as np

LEVEL = 0.95
POWER = 0.8
"""Probability with which a difference has to be found to count as one that would be seen."""

MOST_FLIPPED = 14
"""Most pairs for the sign-flip test: 2^14 sums."""

MOST_SEEDS = 64
"""Most seeds for each setting that are proposed."""

Scores = Mapping[Hashable, float]
"""Score of each seed of a setting."""


@dataclass(frozen=True)
class Difference:
    """The score of one setting minus that of the reference; None where one run cannot tell."""

    value: float
    seeds: int
    paired: bool
    low: float | None = None
    high: float | None = None
    p: float | None = None
    exact: float | None = None
    corrected: float | None = None
    visible: float | None = None
    needed: int | None = None

    @property
    def seen(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def compare(settings: Sequence[Scores], reference: int, chosen: bool) -> dict[int, Difference]:
    """Compare settings with one of them."""
    whole = {i: of for i, of in enumerate(settings) if of and all(map(math.isfinite, of.values()))}
    base = whole.pop(reference, None)
    if base is None:
        return {}
    count = len(whole) + 1
    level = 1 - (1 - LEVEL) * 2 / count if chosen else LEVEL
    found = {position: _difference(of, base, level) for position, of in whole.items()}
    values = {position: one.p for position, one in found.items() if one.p is not None}
    corrected = holm(values, count * (count - 1) // 2 if chosen else len(values))
    return {
        position: replace(one, corrected=corrected.get(position)) for position, one in found.items()
    }


def holm(values: Mapping[int, float], tests: int) -> dict[int, float]:
    """Return p by position, corrected by Holm's method."""
    order = sorted(values, key=values.__getitem__)
    steps = (min(1.0, values[position] * (tests - rank)) for rank, position in enumerate(order))
    return dict(zip(order, accumulate(steps, max), strict=True))


def sign_flips(differences: np.ndarray) -> float:
    """Return p of the exact two-sided sign-flip test that differences are symmetric around 0."""
    n = len(differences)
    signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    sums = np.abs(signs @ differences)
    observed = abs(float(differences.sum()))
    # Sums that are equal but for rounding count as equal.
    return float(np.mean(sums >= observed * (1 - 1e-9)))


def _difference(one: Scores, other: Scores, level: float) -> Difference:
    """Return the difference of two settings, with an interval of ``level``."""
    shared = [seed for seed in one if seed in other]
    if len(shared) > 1:
        pairs = np.array([one[seed] - other[seed] for seed in shared])
        seeds = len(pairs)
        return _tested(
            Difference(
                value=float(pairs.mean()),
                seeds=seeds,
                paired=True,
                exact=sign_flips(pairs) if seeds <= MOST_FLIPPED else None,
            ),
            float(pairs.std(ddof=1)) / math.sqrt(seeds),
            seeds - 1,
            level,
        )
    if len(one) < 2 or len(other) < 2:
        if shared:
            return Difference(one[shared[0]] - other[shared[0]], 1, paired=True)
        return Difference(fmean(one.values()) - fmean(other.values()), 1, paired=False)
    seeds = min(len(one), len(other))
    found = Difference(fmean(one.values()) - fmean(other.values()), seeds, paired=False)
    parts = [float(np.var(list(of.values()), ddof=1)) / len(of) for of in (one, other)]
    error = math.sqrt(sum(parts))
    terms = sum(part**2 / (len(of) - 1) for part, of in zip(parts, (one, other), strict=True))
    freedom = error**4 / terms if terms else 1.0  # Welch and Satterthwaite
    return _tested(found, error, freedom, level)


def _tested(one: Difference, error: float, freedom: float, level: float) -> Difference:
    """Add the t test to a difference."""
    from scipy import special  # imported only for a page that compares several seeds

    def limit(freedom: float) -> float:
        return float(special.stdtrit(freedom, (1 + level) / 2))

    def smallest(seeds: int, freedom: float) -> float:
        """Return the smallest true difference that so many seeds show."""
        errors = special.nctdtrinc(freedom, 1 - POWER, limit(freedom))
        return float(errors) * error * math.sqrt(one.seeds / seeds)

    def shows(seeds: int) -> bool:
        return smallest(seeds, (seeds - 1) * (1 if one.paired else 2)) <= size

    half, size = limit(freedom) * error, abs(one.value)
    more = range(one.seeds + 1, MOST_SEEDS + 1)
    enough = bisect_left(more, True, key=shows) if 0 < size <= half else len(more)
    distance = size / error if error else math.inf if size else 0.0
    return replace(
        one,
        low=one.value - half,
        high=one.value + half,
        p=2 * float(special.stdtr(freedom, -distance)),
        visible=smallest(one.seeds, freedom),
        needed=more[enough] if enough < len(more) else None,
    )
