"""The figures that the page draws, read as JSON, and the table of the runs of a notebook."""

import json
import math

import numpy as np
import pytest

from runner.report import figures, read, write
from runner.report.findings import find
from runner.report.norms import predict
from tests.report.examples import LAYERS, MIXED, config, rates, rows, sweep, troubled, write_run


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
    each = {
        f"{chart}-{mode}" for chart in ("metric", "norm", "coef", "predicted") for mode in modes
    }
    # Of value and adaptive, nearly every step is clipped somewhere: what counts is how much of it.
    each |= {"ratio-norm", "fraction-value", "fraction-adaptive", "loss", "eval-loss", "histogram"}
    heats = {key for key in made if key.startswith("heat-")}
    assert heats
    assert set(made) == each | {"eval-accuracy"} | heats
    # Of ‖G‖ itself, only the thresholds of clip=norm are values.
    assert {key for key in made if threshold_of(made[key])} == {"norm-norm"}
    # Charts that are compared have one vertical axis.
    for chart in ("metric", "norm", "coef"):
        one, *others = (made[f"{chart}-{mode}"].layout.yaxis.range for mode in modes)
        assert others == [one, one]


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


def test_the_map_has_the_mean_of_the_seeds_and_marks_the_highest_stable_rate(tmp_path):
    folder = rates(tmp_path / "s")
    made = figures(folder)
    heat = made["map-norm"].data[0]
    assert list(heat.x) == ["0.25", "1.0", "none"]
    assert list(heat.y) == ["0.02", "0.1", "0.4", "0.8"]
    summaries = [json.loads((folder / str(n) / "summary.json").read_text()) for n in range(24)]
    each = np.asarray([one["best"]["eval/loss"] for one in summaries]).reshape(4, 3, 2)
    # With a threshold of 0.25 alone, a rate of 0.8 is stable.
    expected = each.mean(2)
    expected[3, 1:] = np.nan
    assert np.asarray(heat.z, dtype=float) == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert list(heat.text[3][1:]) == ["diverged", "diverged"]
    marked = {(round(s.x0 + 0.49), round(s.y0 + 0.49)) for s in made["map-norm"].layout.shapes}
    assert marked == {(0, 3), (1, 2), (2, 2)}
    # A band spans the seeds, and lines say what differs.
    bands = {trace.name: trace for trace in made["metric-norm"].data if trace.fill == "toself"}
    assert set(bands) == {f"lr={rate}" for rate in heat.y}
    assert {each[0, 0].min(), each[0, 0].max()} <= set(bands["lr=0.02"].y)


def test_the_share_that_a_threshold_would_clip_is_predicted(tmp_path):
    """Without clipping it is the share of norms above; other modes recorded it."""
    made = rows("none", None, 1000, seed=1)
    for row, norm in zip(made, (1.0, 2.0, 2.0, 3.0), strict=False):
        row["grad/norm"] = norm
    none = config(clip__mode="none", clip__threshold=None)
    write_run(tmp_path / "a" / "0", made, none)
    write_run(tmp_path / "a" / "1", rows("norm", 0.5, 1000, seed=1), config(clip__threshold=0.5))
    predicted = predict(find(read(tmp_path / "a")), "norm")
    for threshold in (0.5, 2.0):  # a norm at the threshold is not clipped
        share = np.mean([row["grad/norm"] > threshold for row in made])
        assert predicted.at(threshold) == pytest.approx(share, abs=1e-12)
