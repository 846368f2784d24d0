from __future__ import annotations

import numpy as np
import pytest

from runner.report.scale import Axis, covering


@pytest.mark.parametrize(
    ("low", "high", "log"),
    [
        (0, 1, False),
        (-3.7, 12, False),
        (0.1234, 0.1239, False),
        (0, 98_765, False),
        (1e-9, 1e9, True),
        (0.1, 2, True),
        (0.9, 1.3, True),
        (3e-4, 7e2, True),
    ],
)
def test_ticks_are_few_distinct_and_inside(low: float, high: float, log: bool) -> None:
    ticks = Axis(low, high, log).ticks()
    assert 2 <= len(ticks) <= 9
    values = [value for value, _ in ticks]
    assert values == sorted(values)
    assert len({text for _, text in ticks}) == len(ticks)
    margin = 0.01 * (high - low)
    assert low - margin <= values[0]
    assert values[-1] <= high + margin


def test_places_run_from_end_to_end() -> None:
    assert Axis(2, 4).place(np.asarray([2, 3, 4])).tolist() == [0, 0.5, 1]
    assert Axis(0.1, 10, True).place(np.asarray([0.1, 1, 10])) == pytest.approx([0, 0.5, 1])


def test_a_log_axis_has_no_place_for_zero_and_below() -> None:
    places = Axis(0.1, 10, True).place(np.asarray([0.0, -1.0, np.nan]))
    assert np.isnan(places).all()


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("values", [[], [5.0], [5.0, 5.0], [np.nan, np.inf], [0.0], [-2.0, 3.0]])
def test_any_values_get_an_axis(values: list[float], log: bool) -> None:
    axis = covering([np.asarray(values)], log=log, title="")
    assert axis.low < axis.high
    assert axis.low > 0 or not log
    shown = [v for v in values if np.isfinite(v) and (v > 0 or not log)]
    assert all(axis.low <= value <= axis.high for value in shown)
