"""Distributions, suggestions and shares against streams whose quantiles are known."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from runner.calibrate.distribution import (
    Histogram,
    candidates,
    distribution,
    suggest,
    suggest_by_parts,
    would_clip,
)
from runner.config.modes import info_of

POINTS = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def stream(kind: str, steps: int) -> tuple[np.ndarray, dict[str, float], float]:
    """Made-up norms in a random order; the quantiles and the mean that they come from."""
    shares = (np.arange(steps) + 0.5) / steps
    if kind == "exponential":
        values = -3.0 * np.log1p(-shares)
        exact = {name: -3.0 * math.log1p(-share) for name, share in POINTS.items()}
        mean = 3.0
    else:
        normal = NormalDist(0.5, 0.7)
        values = np.exp([normal.inv_cdf(share) for share in shares])
        exact = {name: math.exp(normal.inv_cdf(share)) for name, share in POINTS.items()}
        mean = math.exp(0.5 + 0.7**2 / 2)
    return np.random.default_rng(1).permutation(values), exact, mean


@pytest.mark.parametrize("kind", ["exponential", "lognormal"])
def test_known_quantiles_come_back_within_two_per_cent(kind):
    norms, exact, mean = stream(kind, 2000)
    found = distribution(norms)
    for name, value in exact.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.02), name
    assert found.mean == pytest.approx(mean, rel=0.02)
    assert found.max == max(norms)
    suggested = suggest(found)
    assert suggested.start == pytest.approx(exact["p90"], rel=0.02)
    assert suggested.low == pytest.approx(mean / 2, rel=0.02)
    assert suggested.high == pytest.approx(mean * 10, rel=0.02)


def test_the_start_clips_a_tenth_of_the_steps():
    norms, _, _ = stream("lognormal", 2000)
    assert would_clip(norms, suggest(distribution(norms)).start) == pytest.approx(0.1, abs=0.003)


def test_steps_that_are_not_finite_count_as_steps_and_as_nothing_else():
    found = distribution([1.0, math.nan, 3.0, math.inf])
    assert (found.steps, found.nonfinite, found.mean, found.max) == (4, 2, 2.0, 3.0)
    assert would_clip([1.0, math.nan, 3.0, math.nan], 2.0) == 0.25


def test_a_norm_at_the_threshold_is_not_clipped():
    assert would_clip([1.0, 2.0, 3.0], 2.0) == pytest.approx(1 / 3)


@pytest.mark.parametrize("norms", [[], [math.nan, math.inf], [0.0, 0.0]])
def test_nothing_is_suggested_where_there_is_nothing_to_go_by(norms):
    assert suggest(distribution(norms)) is None
    assert would_clip(norms, 1.0) in (0.0, 0.5)


def test_suggestions_have_three_digits():
    suggested = suggest(distribution([1.23456] * 5))
    assert (suggested.start, suggested.low, suggested.high) == (1.23, 0.617, 12.3)


def test_candidates_are_those_studied_for_the_mode_those_suggested_and_ones_own():
    suggested = suggest(distribution([1.0] * 5))
    assert candidates(info_of("norm").studied, suggested, [0.3, None, 0.25]) == [
        0.1,
        0.25,
        0.3,
        0.5,
        1,
        2,
        10,
    ]
    assert candidates(info_of("adaptive").studied, None) == [0.01, 0.02, 0.04, 0.08, 0.16]


def histogram(values: np.ndarray, zeros: int = 0) -> Histogram:
    counts, _ = np.histogram(np.log10(values), 400, (-6, 4))
    return Histogram(counts.tolist(), len(values) + zeros, -6, 4)


def test_a_histogram_gives_shares_and_quantiles_back():
    values, exact, _ = stream("lognormal", 20_000)
    found = histogram(values, zeros=20_000)
    for name, value in exact.items():
        assert found.largest(1 - POINTS[name]) == pytest.approx(value, rel=0.02), name
        assert found.share_above(value) == pytest.approx((1 - POINTS[name]) / 2, abs=0.005), name
    assert found.share_above(1e9) == 0.0
    assert found.share_above(1e-9) == 0.5


@pytest.mark.parametrize("mode", ["adaptive", "value"])
def test_the_start_clips_the_same_share_of_units_whatever_the_largest_is(mode):
    values, _, _ = stream("lognormal", 2000)
    shares = start, low, high = info_of(mode).shares
    suggested = suggest_by_parts(shares, histogram(values))
    for threshold, share in zip(
        (suggested.start, suggested.low, suggested.high), (start, low, high), strict=True
    ):
        assert np.mean(values > threshold) == pytest.approx(share, abs=0.02)
    spoiled = suggest_by_parts(shares, histogram(np.append(values, [1560.0])))
    assert spoiled.start == pytest.approx(suggested.start, rel=0.03)


def test_units_without_any_gradient_suggest_nothing():
    assert suggest_by_parts((0.2, 0.5, 0.05), Histogram([0.0] * 400, 30.0, -6, 4)) is None
