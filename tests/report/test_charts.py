"""The figures that the page draws, read as JSON, and the table of the runs of a notebook."""

import math

import numpy as np
import pytest

from runner.report import figures, frame, write
from tests.report.examples import LAYERS, MIXED, config, rows, sweep, trained, troubled, write_run

MODES = ("norm", "value", "adaptive")


def shows_thresholds(figure):
    return any((trace.name or "").startswith("threshold of") for trace in figure.data)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A sweep of three modes and no clipping."""
    folder = tmp_path_factory.mktemp("charts") / "s"
    return sweep(folder, MIXED, steps=60, what_if=(0.1, 0.5), layers=LAYERS)


@pytest.fixture(scope="module")
def charts(mixed):
    return figures(mixed)


def test_each_mode_has_charts_of_its_own(charts):
    of_modes = ("metric", "norm", "coef", "what-if", "clipped")
    expected = {f"{chart}-{mode}" for chart in of_modes for mode in MODES}
    expected |= {"loss", "eval-loss", "eval-accuracy", "histogram"}
    heats = {key for key in charts if key.startswith("heat-")}
    assert heats
    assert set(charts) == expected | heats


def test_the_page_has_the_figures(mixed, charts):
    page = write(mixed).read_text()
    assert page.count("<figure") == len(charts)
    for key, figure in charts.items():
        assert f'data-chart="{key}"' in page
        assert figure.to_json().replace("<", "\\u003c") in page


def test_only_thresholds_of_the_norm_are_drawn_among_norms(charts):
    assert {key for key in charts if shows_thresholds(charts[key])} == {"norm-norm"}


@pytest.mark.parametrize("chart", ["metric", "norm", "coef"])
def test_charts_of_several_modes_have_one_vertical_axis(chart, charts):
    norm, value, adaptive = (charts[f"{chart}-{mode}"].layout.yaxis.range for mode in MODES)
    assert norm == value == adaptive


def test_a_frame_has_one_row_a_run(mixed):
    assert len(frame(mixed)) == len(MIXED)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Rows of a long run with one spike, and their charts."""
    lines = rows(steps=5000, seed=1)
    lines[3210]["grad/norm"] = 1e6
    folder = write_run(tmp_path_factory.mktemp("charts") / "run", lines, config())
    return lines, figures(folder)


def test_a_spike_of_a_long_run_is_in_the_thinned_curve(long_run):
    _, charts = long_run
    raw, *_ = charts["norm-norm"].data
    assert len(raw.x) < 1000
    assert dict(zip(raw.x, raw.y, strict=True))[3211] == 1e6


def test_the_bold_curve_is_the_geometric_mean_of_a_twentieth_of_the_run(long_run):
    lines, charts = long_run
    _, mean, *_ = charts["norm-norm"].data
    logs = np.log([row["grad/norm"] for row in lines])
    position = int(np.argmin(np.abs(mean.x - 1500)))
    step = int(mean.x[position])
    around = logs[step - 125 : step + 125].mean()
    assert math.log(mean.y[position]) == pytest.approx(around, abs=0.02)


def test_a_short_series_is_drawn_whole(long_run):
    lines, charts = long_run
    losses = [row["eval/loss"] for row in lines if "eval/loss" in row]
    assert charts["eval-loss"].data[0].y == pytest.approx(losses, rel=1e-6)


def test_accuracies_of_trained_runs_fill_their_chart(tmp_path):
    lines = rows(steps=100)
    for row, accuracy in zip(lines[9::10], (0.1, 0.5, *np.linspace(0.9, 0.93, 8)), strict=True):
        row["eval/accuracy"] = float(accuracy)
    axis = figures(write_run(tmp_path / "run", lines, config()))["eval-accuracy"].layout.yaxis
    assert (axis.type, axis.range) == ("linear", pytest.approx((0.9, 0.93), abs=0.01))


@pytest.mark.parametrize("norm", [math.nan, 0.0])
def test_a_run_that_is_lost_from_its_first_row_is_drawn(norm, tmp_path):
    lines = rows("none", None, 30, evaluations=0)
    for row in lines:
        row |= {"train/loss": math.nan, "grad/norm": norm, "grad/norm_clipped": norm}
    assert figures(write_run(tmp_path / "run", lines, config(), state="failed", error="lost"))


def test_a_run_that_diverged_does_not_flatten_other_curves(tmp_path):
    charts = figures(troubled(tmp_path / "s"))
    for key, highest in (("loss", 12), ("norm-norm", 100)):
        axis = charts[key].layout.yaxis
        assert (10 ** axis.range[1] if axis.type == "log" else axis.range[1]) < highest


@pytest.fixture(scope="module")
def metric_chart(tmp_path_factory):
    """The chart of the metric for two thresholds and two learning rates; one setting diverged."""
    losses = {(0.25, 0.1): [0.3, 0.4], (1.0, 0.1): [0.2, 0.25], (0.25, 0.4): [0.5, 0.6]}
    losses[1.0, 0.4] = [math.nan, math.nan]
    return figures(trained(tmp_path_factory.mktemp("charts"), losses))["metric-norm"].data


def test_the_metric_has_a_band_over_the_seeds_for_each_further_key(metric_chart):
    bands = {trace.name: {*trace.y} for trace in metric_chart if trace.fill == "toself"}
    assert bands == {"lr=0.1": {0.3, 0.4, 0.2, 0.25}, "lr=0.4": {0.5, 0.6}}


def test_a_run_that_diverged_has_a_mark_at_the_upper_edge(metric_chart):
    marks = [trace for trace in metric_chart if trace.yaxis == "y2" and trace.legendgroup]
    assert [mark.x[0] for mark in marks] == [1.0, 1.0]
