"""The figures that the page draws, read as JSON, and the table of the runs of a notebook."""

import math

import numpy as np
import pytest

from runner.report import figures, frame, write
from tests.report.examples import LAYERS, MIXED, config, rows, sweep, trained, troubled, write_run


def threshold_of(figure):
    return [one for one in figure.data if (one.name or "").startswith("threshold of")]


def test_each_mode_has_its_own_axis_and_the_page_has_the_figures(tmp_path):
    folder = sweep(tmp_path / "s", MIXED, steps=60, what_if=(0.1, 0.5), layers=LAYERS)
    made, page = figures(folder), write(folder).read_text()
    assert page.count("<figure") == len(made)
    for key, figure in made.items():
        assert f'data-chart="{key}"' in page
        assert figure.to_json().replace("<", "\\u003c") in page
    modes = ("norm", "value", "adaptive")
    each = {f"{chart}-{mode}" for chart in ("metric", "norm", "coef", "what-if") for mode in modes}
    each |= {f"clipped-{mode}" for mode in modes} | {"loss", "eval-loss", "histogram"}
    heats = {key for key in made if key.startswith("heat-")}
    assert heats
    assert set(made) == each | {"eval-accuracy"} | heats
    # Of ‖G‖ itself, only the thresholds of clip=norm are values.
    assert {key for key in made if threshold_of(made[key])} == {"norm-norm"}
    # Charts that are compared have one vertical axis.
    for chart in ("metric", "norm", "coef"):
        one, *others = (made[f"{chart}-{mode}"].layout.yaxis.range for mode in modes)
        assert others == [one, one]
    assert len(frame(folder)) == len(MIXED)


def test_every_value_of_a_short_run_and_every_spike_of_a_long_one_is_in_the_figure(tmp_path):
    made = rows(steps=5000, seed=1)
    made[3210]["grad/norm"] = 1e6
    one = figures(write_run(tmp_path / "run", made, config()))
    raw, mean, *_ = one["norm-norm"].data
    assert len(raw.x) < 1000
    assert dict(zip(raw.x, raw.y, strict=True))[3211] == 1e6
    # The bold curve is the geometric mean of 5 % of the run around each step.
    logs = np.log([row["grad/norm"] for row in made])
    at = int(np.argmin(np.abs(mean.x - 1500)))
    step = int(mean.x[at])
    assert math.log(mean.y[at]) == pytest.approx(logs[step - 125 : step + 125].mean(), abs=0.02)
    losses = [row["eval/loss"] for row in made if "eval/loss" in row]
    assert one["eval-loss"].data[0].y == pytest.approx(losses, rel=1e-6)


def test_accuracies_of_trained_runs_fill_their_chart(tmp_path):
    made = rows(steps=100)
    for row, accuracy in zip(made[9::10], (0.1, 0.5, *np.linspace(0.9, 0.93, 8)), strict=True):
        row["eval/accuracy"] = float(accuracy)
    axis = figures(write_run(tmp_path / "run", made, config()))["eval-accuracy"].layout.yaxis
    assert (axis.type, axis.range) == ("linear", pytest.approx((0.9, 0.93), abs=0.01))


def test_a_run_that_is_lost_from_its_first_row_is_drawn_and_flattens_no_other(tmp_path):
    one = figures(troubled(tmp_path / "s"))
    for key, highest in (("loss", 12), ("norm-norm", 100)):
        axis = one[key].layout.yaxis
        assert (10 ** axis.range[1] if axis.type == "log" else axis.range[1]) < highest
    for value in (math.nan, 0.0):
        lines = rows("none", None, 30, evaluations=0)
        for row in lines:
            row |= {"train/loss": math.nan, "grad/norm": value, "grad/norm_clipped": value}
        folder = write_run(tmp_path / str(value), lines, config(), state="failed", error="lost")
        assert figures(folder)


def test_the_metric_has_a_band_over_the_seeds_and_a_line_for_each_other_key(tmp_path):
    losses = {(0.25, 0.1): [0.3, 0.4], (1.0, 0.1): [0.2, 0.25], (0.25, 0.4): [0.5, 0.6]}
    losses[1.0, 0.4] = [math.nan, math.nan]
    data = figures(trained(tmp_path, losses))["metric-norm"].data
    bands = {trace.name: {*trace.y} for trace in data if trace.fill == "toself"}
    assert bands == {"lr=0.1": {0.3, 0.4, 0.2, 0.25}, "lr=0.4": {0.5, 0.6}}
    # What diverged has a mark at the upper edge instead of a value.
    assert [trace.x[0] for trace in data if trace.yaxis == "y2" and trace.legendgroup] == [1.0, 1.0]
