"""Distributions, suggestions and shares against a stream whose quantiles are known."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from runner.calibrate.calibrate import Histogram, distribution, suggest, would_clip
from runner.config.modes import info_of

NORMAL = NormalDist(0.5, 0.7)
VALUES = np.exp([NORMAL.inv_cdf((i + 0.5) / 2000) for i in range(2000)])
NORMS = np.random.default_rng(1).permutation(VALUES)
EXACT = {point: math.exp(NORMAL.inv_cdf(point / 100)) for point in (50, 75, 90, 95, 99)}
MEAN = math.exp(0.5 + 0.7**2 / 2)


def histogram(values, zeros=0):
    counts, _ = np.histogram(np.log10(values), 400, (-6, 4))
    return Histogram(counts.tolist(), len(values) + zeros, -6, 4)


def test_known_quantiles_come_back_within_two_per_cent():
    measured = distribution(NORMS)
    parts = histogram(NORMS, zeros=2000)
    for point, value in EXACT.items():
        assert measured[f"p{point}"] == pytest.approx(value, rel=0.02), point
        share = 1 - point / 100
        assert parts.largest(share) == pytest.approx(value, rel=0.02), point
        assert parts.share_above(value) == pytest.approx(share / 2, abs=0.005), point
    assert (parts.share_above(1e9), parts.share_above(1e-9)) == (0.0, 0.5)
    assert (measured["mean"], measured["max"]) == (pytest.approx(MEAN, rel=0.02), max(NORMS))
    suggested = suggest(measured["p90"], measured["mean"] / 2, measured["mean"] * 10)
    assert tuple(suggested.values()) == pytest.approx((EXACT[90], MEAN / 2, MEAN * 10), rel=0.02)
    assert would_clip(NORMS, suggested["start"]) == pytest.approx(0.1, abs=0.003)


def test_steps_that_are_not_finite_are_counted_apart():
    measured = distribution([1.0, math.nan, 3.0, math.inf])
    assert [measured[key] for key in ("steps", "nonfinite", "mean", "max")] == [4, 2, 2.0, 3.0]


def test_the_share_that_a_threshold_would_clip_is_of_all_steps():
    assert would_clip([1.0, math.nan, 3.0, math.nan], 2.0) == 0.25
    assert would_clip([1.0, 2.0, 3.0], 2.0) == pytest.approx(1 / 3), "at the threshold: not clipped"
    assert would_clip([], 1.0) == 0.0


@pytest.mark.parametrize("norms", [[], [math.nan, math.inf], [0.0, 0.0]], ids=str)
def test_nothing_is_suggested_without_a_positive_norm(norms):
    assert suggest(distribution(norms)["p90"], 1.0, 1.0) is None


def test_a_histogram_of_zeros_has_no_largest_share():
    assert math.isnan(Histogram([0.0] * 400, 30.0, -6, 4).largest(0.2))


@pytest.mark.parametrize("mode", ["adaptive", "value"])
def test_the_start_clips_the_same_share_of_units_whatever_the_largest_is(mode):
    shares = info_of(mode).shares
    suggested = suggest(*map(histogram(VALUES).largest, shares))
    assert [np.mean(end < VALUES) for end in suggested.values()] == pytest.approx(
        list(shares), abs=0.02
    )
    spoiled = suggest(*map(histogram(np.append(VALUES, [1560.0])).largest, shares))
    assert spoiled["start"] == pytest.approx(suggested["start"], rel=0.03)
