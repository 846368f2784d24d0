from __future__ import annotations

import re

import numpy as np

from runner.report.chart import Curve, line_chart, path
from runner.report.scale import Axis


def test_a_line_is_interrupted_where_a_value_is_missing() -> None:
    xs = np.arange(6.0)
    ys = np.asarray([1, 2, np.nan, 3, np.nan, 4])
    lone = "M3.0 3.0L3.0 3.0"
    assert path(xs, ys) == f"M0.0 1.0L1.0 2.0L1.0 2.0{lone}M5.0 4.0L5.0 4.0"
    assert path(xs[:0], ys[:0]) == ""


def test_a_spike_reaches_the_drawing() -> None:
    steps = np.arange(1, 10_001.0)
    values = np.ones(10_000)
    values[6543] = 100.0
    axes = (Axis(0, 10_000), Axis(0.1, 1000, True))
    chart = line_chart("k", "t", "n", axes, [Curve(0, "a", steps, values, "#000")])
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", re.search(r' d="([^"]+)"', chart).group(1))  # type: ignore[union-attr]
    assert len(points) <= 2 * 400 + 3
    assert len({y for _, y in points}) == 2


def test_the_step_from_which_a_curve_is_lost_is_marked_with_its_value() -> None:
    steps = np.arange(1, 6.0)
    values = np.asarray([1, 2, np.inf, np.nan, 3])
    axes = (Axis(0, 6), Axis(0, 4))
    chart = line_chart("k", "t", "n", axes, [Curve(0, "a<b", steps, values, "#000")])
    assert "a&lt;b: ∞ at step 3, and at 1 more of the recorded steps" in chart
