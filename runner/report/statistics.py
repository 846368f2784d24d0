"""Differences between the settings of a sweep, and what they are worth.

Runs of equal seed read the same samples and start from the same weights, so settings are compared
seed by seed. All pairs of settings are compared by Tukey's test in blocks, the seeds (Tukey 1953;
Kramer 1956 for missing values): the interval and p of a difference come from one studentized range
of all settings, so an interval is without zero exactly where p < 0.05, whichever pair the results
led a reader to. The noise is what setting and seed leave unexplained, pooled over settings. A
setting whose noise is over `NOISY` times the median keeps its own: the paired differences give it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import numpy as np

LEVEL = 0.95
PROBABLY = 0.2  # p up to which a difference is called probable
POWER = 0.8  # probability with which proposed seeds would show the difference that was found
MOST_SEEDS = 20  # that are proposed; a difference that needs more is a tie
NOISY = 3.0
Scores = Mapping[Hashable, float]  # of the seeds of a setting


@dataclass(frozen=True)
class Difference:
    """Score of a setting minus the reference's over common seeds; None where fewer than two are.

    Attributes:
        needed: seeds that would show this difference four times in five, at most `MOST_SEEDS`.
        same: whether all scores are equal.
    """

    value: float
    seeds: int
    low: float | None = None
    high: float | None = None
    p: float | None = None
    needed: int | None = None
    same: bool = False

    @property
    def seen(self) -> bool:
        return self.p is not None and self.p < 1 - LEVEL

    @property
    def probable(self) -> bool:
        return self.p is not None and self.p < PROBABLY


@dataclass(frozen=True)
class Noise:
    """Standard deviation of a score without its setting and seed, pooled over settings."""

    deviation: float
    degrees: int
    pooled: frozenset[int]


def compare(settings: Sequence[Scores], reference: int) -> dict[int, Difference]:
    """Compare settings with one of them; one that has no score, or a lost one, is left out."""
    finite = {}
    for place, scores in enumerate(settings):
        if scores and all(math.isfinite(score) for score in scores.values()):
            finite[place] = scores
    if reference not in finite:
        return {}
    noise = noise_of(finite)
    return {
        place: _difference(scores, finite[reference], {place, reference}, noise, len(finite))
        for place, scores in finite.items()
        if place != reference
    }


def noise_of(settings: Mapping[int, Scores]) -> Noise:
    """Return the noise of all settings but those that are much noisier than the median."""
    pooled = set(settings)
    while True:
        squares, degrees = _residuals({place: settings[place] for place in sorted(pooled)})
        mean_squares = {}
        for place, square in squares.items():
            mean_squares[place] = square / len(settings[place])
        limit = NOISY**2 * float(np.median([*mean_squares.values()]))
        noisiest = max(mean_squares, key=mean_squares.__getitem__)
        if degrees < 1 or len(pooled) < 3 or mean_squares[noisiest] <= limit:
            variance = sum(squares.values()) / degrees if degrees > 0 else math.nan
            return Noise(math.sqrt(variance), degrees, frozenset(pooled))
        pooled.remove(noisiest)


def _residuals(settings: Mapping[int, Scores]) -> tuple[dict[int, float], int]:
    """Fit setting + seed; return the squared residuals by setting, and the degrees of freedom."""
    seeds = [*dict.fromkeys(seed for scores in settings.values() for seed in scores)]
    columns = {seed: len(settings) + number for number, seed in enumerate(seeds)}
    pairs = []
    values = []
    for row, scores in enumerate(settings.values()):
        for seed, score in scores.items():
            pairs.append((row, columns[seed]))
            values.append(score)
    design = np.zeros((len(values), len(settings) + len(seeds)))
    for number, pair in enumerate(pairs):
        design[number, pair] = 1.0
    centred = np.asarray(values) - np.mean(values)  # more digits for what is left
    fit, _, rank, _ = np.linalg.lstsq(design, centred, rcond=None)
    residuals = centred - design @ fit
    residuals[np.abs(residuals) < 1e-12 * np.abs(values).max()] = 0.0
    squares = dict.fromkeys(settings, 0.0)
    places = [*settings]
    for (row, _), residual in zip(pairs, residuals, strict=True):
        squares[places[row]] += float(residual**2)
    return squares, len(values) - int(rank)


def _difference(
    scores: Scores, reference: Scores, pair: set[int], noise: Noise, count: int
) -> Difference:
    """Return the difference of a pair of ``count`` settings."""
    values = np.array([scores[seed] - reference[seed] for seed in scores if seed in reference])
    seeds = len(values)
    if not seeds:
        return Difference(fmean(scores.values()) - fmean(reference.values()), 0)
    mean = float(values.mean())
    if seeds == 1:
        return Difference(mean, 1)
    pooled = pair <= noise.pooled
    # Both scores of a pair have the noise; their difference has √2 times as much.
    deviation = math.sqrt(2) * noise.deviation if pooled else float(values.std(ddof=1))
    degrees = noise.degrees if pooled else seeds - 1
    error = deviation / math.sqrt(seeds)
    size = abs(mean)
    if error == 0:
        p = 1.0 if size == 0 else 0.0
        return Difference(mean, seeds, mean, mean, p, same=not values.any())
    p = tail(math.sqrt(2) * size / error, count, degrees)
    half = limit(count, degrees) / math.sqrt(2) * error
    needed = None
    if p >= 1 - LEVEL and size > 0:
        settings = len(noise.pooled) if pooled else 2
        needed = _needed(size / deviation, seeds, count, settings)
    same = not values.any()
    return Difference(mean, seeds, mean - half, mean + half, p, needed, same)


def _needed(effect: float, seeds: int, count: int, settings: int) -> int | None:
    """Return how many seeds show a difference of ``effect`` deviations with a power of `POWER`."""
    from scipy import special  # imported only for a page that compares several seeds

    for more in range(seeds + 1, MOST_SEEDS + 1):
        degrees = (settings - 1) * (more - 1)
        critical = limit(count, degrees) / math.sqrt(2)
        if special.nctdtrinc(degrees, 1 - POWER, critical) <= effect * math.sqrt(more):
            return more
    return None


def tail(q: float, count: int, degrees: int) -> float:
    """Return the probability that the studentized range of ``count`` means exceeds ``q``.

    The integral over the deviation and over the largest mean is a sum over a grid, in which the
    error of the trapezoidal rule falls exponentially.
    """
    from scipy import special

    width = 8 / math.sqrt(2 * degrees)
    logs = np.linspace(-12 / degrees - width, min(2.2, width), 120)
    deviations = np.exp(logs)
    half = degrees / 2
    densities = degrees * logs - half * deviations**2
    densities += math.log(2) + half * math.log(half) - special.gammaln(half)
    weights = np.exp(densities) * (logs[1] - logs[0])
    largest = np.linspace(-8, 8, 81)
    normal = np.exp(-(largest**2) / 2) / math.sqrt(2 * math.pi) * (largest[1] - largest[0])
    below = special.ndtr(largest)[:, None] - special.ndtr(largest[:, None] - q * deviations)
    ranges = count * normal @ below ** (count - 1)
    return min(1.0, max(0.0, 1 - float(weights @ ranges)))


@lru_cache(maxsize=1024)
def limit(count: int, degrees: int) -> float:
    """Return the studentized range that ``count`` equal means exceed with probability 0.05."""
    low = 0.0
    high = 4.0
    while tail(high, count, degrees) > 1 - LEVEL:
        low = high
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if tail(middle, count, degrees) > 1 - LEVEL:
            low = middle
        else:
            high = middle
    return high
