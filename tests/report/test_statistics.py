"""Differences of settings against scipy's own tests, and what they promise in simulated sweeps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from runner.report.statistics import LEVEL, Difference, compare, holm, sign_flips

SEEDS = 5


def sweep(means: list[float], seeds: int, random: np.random.Generator) -> list[dict[Any, float]]:
    """Scores of settings: each has its mean, and each seed adds its own to all of them."""
    of_seed = random.normal(0, 3, seeds)
    noise = random.normal(0, 1, (len(means), seeds))
    return [
        {str(seed): mean + of_seed[seed] + noise[i, seed] for seed in range(seeds)}
        for i, mean in enumerate(means)
    ]


def best(settings: list[dict[Any, float]]) -> int:
    return int(np.argmin([np.mean(list(one.values())) for one in settings]))


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_pairs_agree_with_scipy(seeds: int) -> None:
    settings = sweep([0.0, 0.5, 3.0], seeds, np.random.default_rng(seeds))
    for position, one in compare(settings, 0, chosen=False).items():
        pair = [list(settings[i].values()) for i in (position, 0)]
        expected: Any = stats.ttest_rel(*pair)
        low, high = expected.confidence_interval(LEVEL)
        assert (one.low, one.high, one.p) == pytest.approx((low, high, expected.pvalue), rel=1e-9)
        flipped = stats.permutation_test(
            (np.subtract(*pair),), np.mean, permutation_type="samples", n_resamples=np.inf
        )
        assert one.exact == pytest.approx(flipped.pvalue, rel=1e-12)
        assert (one.paired, one.seeds) == (True, seeds)


def test_other_seeds_agree_with_welchs_test_of_scipy() -> None:
    random = np.random.default_rng(0)
    one = {seed: float(x) for seed, x in enumerate(random.normal(0, 1, 4))}
    other = {seed + 10: float(x) for seed, x in enumerate(random.normal(1, 3, 7))}
    found = compare([other, one], 0, chosen=False)[1]
    expected: Any = stats.ttest_ind(list(one.values()), list(other.values()), equal_var=False)
    low, high = expected.confidence_interval(LEVEL)
    assert (found.low, found.high, found.p) == pytest.approx((low, high, expected.pvalue))
    assert (found.paired, found.seeds, found.exact) == (False, 4, None)


def test_against_the_best_the_level_rises_with_the_number_of_settings() -> None:
    settings = sweep([0.0, 0.1, 0.2, 0.3], SEEDS, np.random.default_rng(3))
    first = best(settings)
    found = compare(settings, first, chosen=True)
    for position, one in found.items():
        pair = [list(settings[i].values()) for i in (position, first)]
        interval = stats.ttest_rel(*pair).confidence_interval(1 - 0.05 * 2 / 4)
        assert (one.low, one.high) == pytest.approx(tuple(interval), rel=1e-9)


def test_p_is_corrected_by_holms_method() -> None:
    # A textbook's example: 0.005 x 4, 0.01 x 3, 0.03 x 2, and no value below one before it.
    values = {0: 0.01, 1: 0.04, 2: 0.03, 3: 0.005}
    assert holm(values, 4) == pytest.approx({3: 0.02, 0: 0.03, 2: 0.06, 1: 0.06})
    assert holm(values, 10) == pytest.approx({3: 0.05, 0: 0.09, 2: 0.24, 1: 0.28})
    assert holm({0: 0.5, 1: 0.9}, 10) == {0: 1.0, 1: 1.0}
    settings = sweep([0.0, 0.5, 1.0, 2.0], SEEDS, np.random.default_rng(1))
    named = compare(settings, 0, chosen=False)
    expected = holm({i: one.p for i, one in named.items() if one.p is not None}, 3)
    assert {i: one.corrected for i, one in named.items()} == expected


def covered(
    means: list[float], seeds: int, chosen: bool, unpaired: bool = False
) -> tuple[float, float, float]:
    """Simulate 1,000 sweeps.

    Returns:
        Share of intervals that hold the true difference; of sweeps with a corrected p of at most
        0.05; and of sweeps in which all intervals leave 0 out.
    """
    random = np.random.default_rng(len(means) * 100 + seeds)
    held, small, won = [], 0, 0
    for _ in range(1000):
        settings = sweep(means, seeds, random)
        if unpaired:  # a setting whose seeds are all others than those of the reference
            other = sweep(means, seeds, random)[1:]
            settings[1:] = [{f"other {seed}": x for seed, x in one.items()} for one in other]
        reference = best(settings) if chosen else 0
        found = compare(settings, reference, chosen)
        for position, one in found.items():
            assert one.low is not None
            assert one.high is not None
            held.append(one.low <= means[position] - means[reference] <= one.high)
        small += any((one.corrected or 0) <= 0.05 for one in found.values())
        won += all(one.seen for one in found.values())
    return float(np.mean(held)), small / 1000, won / 1000


@pytest.mark.parametrize(
    ("means", "seeds", "chosen", "unpaired"),
    [
        pytest.param([0.0, 0.3, 0.6, 1.0], 3, False, False, id="baseline"),
        pytest.param([0.0, 0.3], 5, False, True, id="unpaired"),
        pytest.param([0.0, 0.0, 0.0], 5, True, False, id="equal"),
        pytest.param([0.0, 0.2, 0.4, 0.8], 5, True, False, id="best"),
    ],
)
def test_95_of_100_intervals_hold_the_truth(
    means: list[float], seeds: int, chosen: bool, unpaired: bool
) -> None:
    share, _, _ = covered(means, seeds, chosen, unpaired)
    assert 0.93 <= share <= 0.97


def test_ordinary_intervals_against_the_best_hold_the_truth_too_seldom() -> None:
    """The reason for the correction: without it the test above would fail."""
    random = np.random.default_rng(0)
    scores = random.normal(0, 1, (1000, 8, 10))
    first = scores.mean(2).argmin(1)
    differences = scores - scores[np.arange(1000), first][:, None]
    error = differences.std(2, ddof=1) / math.sqrt(10)
    other = np.arange(8) != first[:, None]
    held = np.abs(differences.mean(2)) <= stats.t.ppf(0.975, 9) * error
    assert held[other].mean() < 0.91
    assert covered([0.0] * 8, 10, chosen=True)[0] >= 0.95


@pytest.mark.parametrize("count", [2, 5])
def test_equal_settings_seldom_have_a_winner_or_a_small_p(count: int) -> None:
    _, small, won = covered([0.0] * count, 4, chosen=True)
    assert small <= 0.065  # 0.05, and two standard errors of 1,000 sweeps
    assert won <= 0.065


def test_the_difference_that_seeds_show_is_shown_four_times_in_five() -> None:
    one = compare(sweep([0.0, 0.0], 6, np.random.default_rng(5)), 0, chosen=False)[1]
    assert one.low is not None
    assert one.high is not None
    assert one.visible is not None
    deviation = (one.high - one.low) / 2 / stats.t.ppf(0.975, 5) * math.sqrt(6)
    drawn = np.random.default_rng(6).normal(one.visible, deviation, (20_000, 6))
    shown = stats.ttest_1samp(drawn, 0, axis=1).pvalue <= 0.05
    assert shown.mean() == pytest.approx(0.8, abs=0.01)


def test_the_seeds_that_are_needed_are_the_fewest_with_that_power() -> None:
    settings = sweep([0.0, 2.0], 4, np.random.default_rng(0))
    one = compare(settings, 0, chosen=False)[1]
    assert not one.seen
    assert one.needed is not None
    pairs = np.subtract(*(list(setting.values()) for setting in settings[::-1]))

    def power(seeds: int) -> float:
        shift = abs(pairs.mean()) / pairs.std(ddof=1) * math.sqrt(seeds)
        return float(stats.nct.sf(stats.t.ppf(0.975, seeds - 1), seeds - 1, shift))

    assert power(one.needed) >= 0.8 > power(one.needed - 1)


NOTHING = Difference(1.0, 1, paired=True)
A, B = {"0": 1.0, "1": 2.0, "2": 4.0}, {"0": 2.0, "1": 3.5, "2": 4.5}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param([{"0": 1.0}, {"0": 2.0}], {1: NOTHING}, id="one seed"),
        pytest.param([{"0": 1.0}, {"1": 2.0}], {1: Difference(1.0, 1, False)}, id="other seeds"),
        pytest.param([A, A | {"3": math.nan}], {}, id="a run that diverged"),
        pytest.param([A, {"0": math.inf}], {}, id="a loss without bound"),
        pytest.param([A, {}], {}, id="no run finished"),
        pytest.param([{"0": math.nan}, A], {}, id="a baseline that diverged"),
        pytest.param([A], {}, id="alone"),
    ],
)
def test_what_no_test_can_compare(
    settings: list[dict[Any, float]], expected: dict[int, Difference]
) -> None:
    assert compare(settings, 0, chosen=False) == expected
    assert not any(one.seen for one in compare(settings, 0, chosen=True).values())


def test_a_missing_seed_leaves_the_pairs_of_the_others() -> None:
    whole = compare([A, B], 0, chosen=False)[1]
    short = compare([A | {"3": 9.0}, B | {"4": -9.0}], 0, chosen=False)[1]
    assert short == whole
    assert compare([A, {"0": 2.0, "1": 3.5}], 0, chosen=False)[1].seeds == 2


def test_two_seeds_have_an_interval_of_one_degree_of_freedom() -> None:
    one = compare([{"0": 0.0, "1": 0.0}, {"0": 1.0, "1": 1.2}], 0, chosen=False)[1]
    assert one.high is not None
    assert one.high - one.value == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert one.exact == 0.5
    assert one.needed == 3


def test_equal_scores_are_no_difference_and_equal_differences_are_certain() -> None:
    same = compare([A, dict(A)], 0, chosen=False)[1]
    assert (same.value, same.p, same.exact, same.corrected) == (0.0, 1.0, 1.0, 1.0)
    assert (same.seen, same.visible, same.needed) == (False, 0.0, None)
    shifted = compare([A, {seed: score + 1 for seed, score in A.items()}], 0, chosen=False)[1]
    assert (shifted.value, shifted.low, shifted.high, shifted.p) == (1.0, 1.0, 1.0, 0.0)
    assert shifted.seen


def test_sums_that_rounding_alone_tells_apart_are_equal() -> None:
    assert sign_flips(np.array([0.1, 0.2, 0.3])) == 0.25
    assert sign_flips(np.array([0.1, 0.2, -0.3])) == 1.0
