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
    finite = {}
    for place, scores in enumerate(settings):
        if scores and all(math.isfinite(score) for score in scores.values()):
            finite[place] = scores
    base = finite.pop(reference, None)
    if base is None:
        return {}
    count = len(finite) + 1
    level = 1 - (1 - LEVEL) * 2 / count if chosen else LEVEL
    differences = {place: _difference(scores, base, level) for place, scores in finite.items()}
    p_values = {}
    for place, difference in differences.items():
        if difference.p is not None:
            p_values[place] = difference.p
    corrected = holm(p_values, count * (count - 1) // 2 if chosen else len(p_values))
    return {
        place: replace(difference, corrected=corrected.get(place))
        for place, difference in differences.items()
    }


def holm(p_values: Mapping[int, float], tests: int) -> dict[int, float]:
    """Correct the p of each setting for the number of tests; the result rises as p does."""
    corrected: dict[int, float] = {}
    highest = 0.0
    for rank, place in enumerate(sorted(p_values, key=p_values.__getitem__)):
        highest = max(highest, min(1.0, p_values[place] * (tests - rank)))
        corrected[place] = highest
    return corrected


def _difference(scores: Scores, reference: Scores, level: float) -> Difference:
    """Return the difference of two settings, with an interval of ``level``."""
    differences = np.array([scores[seed] - reference[seed] for seed in scores if seed in reference])
    count = len(differences)
    if not count:
        return Difference(fmean(scores.values()) - fmean(reference.values()), 0)
    mean = float(differences.mean())
    if count == 1:
        return Difference(mean, 1)
    from scipy import special  # imported only for a page that compares several seeds

    error = float(differences.std(ddof=1)) / math.sqrt(count)

    def limit(seeds: int) -> float:
        return float(special.stdtrit(seeds - 1, (1 + level) / 2))

    def smallest(seeds: int) -> float:
        errors = special.nctdtrinc(seeds - 1, 1 - POWER, limit(seeds))
        return float(errors) * error * math.sqrt(count / seeds)

    half = limit(count) * error
    size = abs(mean)
    undecided = 0 < size <= half
    more_seeds = range(count + 1, MOST_SEEDS + 1) if undecided else ()
    distance = size / error if error else math.inf if size else 0.0
    return Difference(
        value=mean,
        seeds=count,
        low=mean - half,
        high=mean + half,
        p=2 * float(special.stdtr(count - 1, -distance)),
        visible=smallest(count),
        needed=next((seeds for seeds in more_seeds if smallest(seeds) <= size), None),
    )
