from __future__ import annotations

import numpy as np
import pytest

from runner.report.thin import kept, rolling_mean


def test_few_points_stay_as_they_are() -> None:
    assert kept(np.arange(20.0), 10).tolist() == list(range(20))
    assert kept(np.empty(0), 10).tolist() == []


@pytest.mark.parametrize("at", [0, 1, 4999, 7777, 9999])
@pytest.mark.parametrize("height", [1e6, -1e6])
def test_a_single_spike_survives_wherever_it_is(at: int, height: float) -> None:
    values = np.sin(np.arange(10_000) / 50)
    values[at] = height
    indices = kept(values, 200)
    assert at in indices
    assert len(indices) <= 2 * 200 + 2
    assert np.all(np.diff(indices) > 0)


def test_the_range_within_every_bucket_is_kept() -> None:
    values = np.random.default_rng(0).normal(size=9_600)
    chosen = values[kept(values, 96)]
    assert chosen.min() == values.min()
    assert chosen.max() == values.max()
    for start in range(0, 9_600, 100):
        part = set(values[start : start + 100]) & set(chosen)
        assert {values[start : start + 100].min(), values[start : start + 100].max()} <= part


def test_what_is_not_finite_stays_a_gap() -> None:
    values = np.ones(5_000)
    values[1234] = np.nan
    values[3000:4000] = np.inf
    indices = kept(values, 50)
    assert 1234 in indices
    assert 3000 in indices
    inside = indices[(indices >= 3100) & (indices < 3900)]
    assert not np.isfinite(values[inside]).any()


def test_rolling_mean_is_of_the_neighbours() -> None:
    random = np.random.default_rng(1).normal(size=200)
    mean = rolling_mean(random, 9)
    assert mean[100] == pytest.approx(random[96:105].mean())
    assert mean[0] == pytest.approx(random[:5].mean())
    assert mean[-1] == pytest.approx(random[-5:].mean())
    assert rolling_mean(random, 1).tolist() == random.tolist()


def test_rolling_mean_passes_over_what_is_not_finite_and_shows_it() -> None:
    values = np.asarray([1.0, np.nan, 3.0, np.inf, 5.0])
    mean = rolling_mean(values, 3)
    assert np.isnan(mean[[1, 3]]).all()
    assert mean[[0, 2, 4]].tolist() == [1.0, 3.0, 5.0]
