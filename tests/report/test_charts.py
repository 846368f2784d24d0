"""The figures that the page draws, and the table of the runs, as a notebook has them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from plotly import graph_objects as go

from runner.report import NoRunError, figures, frame, read, write
from runner.report.charts import sections
from runner.report.findings import find
from runner.report.rates import Grid
from tests.report.examples import MIXED, NORM, config, rates, rows, sweep, troubled, write_run

CELLS = """
import sys
from runner.report import figures, frame
made = figures(FOLDER)
print(sorted(made))
made["eval-loss"]
---
print(frame(FOLDER)["best/eval/loss"].idxmin())
"""


def test_a_notebook_shows_the_figures_and_the_table(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    folder = sweep(tmp_path / "s", NORM, steps=40)
    cells = CELLS.replace("FOLDER", repr(str(folder))).split("---")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c.strip()) for c in cells])
    limits = {"timeout": 120, "startup_timeout": 120}
    nbclient.NotebookClient(notebook, **limits, kernel_name="python3").execute()
    first, second = (cell.outputs for cell in notebook.cells)
    assert "metric-norm" in first[0].text
    shown = first[1].data["application/vnd.plotly.v1+json"]
    assert shown["layout"]["title"]["text"] == "Evaluation loss"
    entries = json.loads((folder / "sweep.json").read_text())["runs"]
    best = min(entries, key=lambda entry: entry["objective"])
    assert second[0].text.strip() == str(best["number"])


def test_the_page_has_the_figures_of_the_notebook(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", MIXED, steps=60, what_if=(0.1, 0.5), layers=("a", "b"))
    made = figures(folder)
    page = write(folder).read_text()
    assert page.count("<figure") == len(made) > 15
    for key, figure in made.items():
        assert isinstance(figure, go.Figure)
        assert f'data-chart="{key}"' in page
        assert figure.to_json().replace("<", "\\u003c") in page
    with pytest.raises(NoRunError):
        figures(tmp_path / "missing")


def test_every_value_of_a_short_run_and_every_spike_of_a_long_one_is_in_the_figure(
    tmp_path: Path,
) -> None:
    made = rows(steps=5000, seed=1)
    made[3210]["grad/norm"] = 1e6
    one = figures(write_run(tmp_path / "run", made, config()))
    raw, mean, *_ = one["norm-norm"].data
    assert len(raw.x) < 1000
    assert dict(zip(raw.x, raw.y, strict=True))[3211] == 1e6
    assert raw.y.dtype == mean.y.dtype == np.float32
    # The bold curve is the geometric mean of 5 % of the run around each step.
    logs = np.log([row["grad/norm"] for row in made])
    at = int(np.argmin(np.abs(mean.x - 1500)))
    step = int(mean.x[at])
    assert math.log(mean.y[at]) == pytest.approx(logs[step - 125 : step + 125].mean(), abs=0.02)
    losses = [row["eval/loss"] for row in made if "eval/loss" in row]
    assert one["eval-loss"].data[0].y == pytest.approx(losses, rel=1e-6)


def test_thresholds_that_move_and_the_noise_scale_are_drawn(tmp_path: Path) -> None:
    made = rows(steps=300)
    for i, row in enumerate(made):
        row["clip/threshold"] = 1 + i / 300
        row["noise/ranks/scale"] = 50.0 + i
    one = figures(write_run(tmp_path / "run", made, config()))
    (moving,) = [t for t in one["norm-norm"].data if t.name.startswith("threshold of")]
    assert moving.y == pytest.approx([row["clip/threshold"] for row in made])
    assert moving.x.tolist() == list(range(1, 301))
    assert one["noise-ranks"].data[0].y == pytest.approx([50.0 + i for i in range(300)])
    bare = figures(write_run(tmp_path / "bare", rows(steps=300), config()))
    (level,) = [t for t in bare["norm-norm"].data if t.name.startswith("threshold of")]
    assert set(level.y) == {1.0}
    assert "noise-ranks" not in bare
    # A moving threshold of another mode is no value of the norm: it has a chart of its own.
    of = config(clip__mode="value", clip__threshold=0.1)
    other = figures(write_run(tmp_path / "value", made, of))
    assert not [t for t in other["norm-value"].data if t.name.startswith("threshold of")]
    assert len(other["threshold-value"].data[0].y) == 300


def test_a_diverged_run_does_not_flatten_the_others(tmp_path: Path) -> None:
    one = figures(troubled(tmp_path / "s"))
    for key, highest in (("loss", 12), ("norm-norm", 100)):
        axis = one[key].layout.yaxis
        top = 10 ** axis.range[1] if axis.type == "log" else axis.range[1]
        assert top < highest


def test_the_map_has_the_mean_of_the_seeds_and_marks_the_highest_stable_rate(
    tmp_path: Path,
) -> None:
    folder = rates(tmp_path / "s")
    one = figures(folder)["map-norm"]
    heat = one.data[0]
    assert list(heat.x) == ["0.25", "1.0", "none"]
    assert list(heat.y) == ["0.02", "0.1", "0.4", "0.8"]
    summaries = [json.loads((folder / str(n) / "summary.json").read_text()) for n in range(24)]
    best = np.asarray([one["best"]["eval/loss"] for one in summaries]).reshape(4, 3, 2).mean(2)
    # With a threshold of 0.25 alone, a rate of 0.8 is stable.
    assert heat.z[:3] == pytest.approx(best[:3], rel=1e-6)
    assert heat.z[3][0] == pytest.approx(best[3][0], rel=1e-6)
    assert np.isnan(heat.z[3][1:]).all()
    assert list(heat.text[3][1:]) == ["diverged", "diverged"]
    marked = {(round(s.x0 + 0.49), round(s.y0 + 0.49)) for s in one.layout.shapes}
    assert marked == {(0, 3), (1, 2), (2, 2)}


@pytest.mark.parametrize("higher", [False, True])
def test_sensitivity_is_the_mean_shortfall_with_diverged_runs_at_the_start(higher: bool) -> None:
    sign = -1 if higher else 1
    scores = {(0.1, "1"): 0.5, (0.2, "1"): 0.3, (0.4, "1"): math.nan, (0.8, "1"): 9.0}
    scores = {cell: sign * value for cell, value in scores.items()}
    grid = Grid((0.1, 0.2, 0.4, 0.8), ("1",), {}, scores, sign * 2.3, True)
    # min(loss, 2.3) - 0.3 at the four rates: 0.2, 0, 2 and 2.
    assert grid.sensitivity("1", higher) == pytest.approx(4.2 / 4)
    assert grid.highest("1") == 0.8
    assert grid.sensitivity("2", higher) is None


def test_three_varied_keys_have_parallel_coordinates(tmp_path: Path) -> None:
    assert "parallel" not in figures(rates(tmp_path / "two", seeds=(0,)))
    one = figures(rates(tmp_path / "three", seeds=(0,), momenta=(0.0, 0.9)))["parallel"]
    names = ["clip.threshold", "optimizer.lr", "optimizer.momentum", "best eval/loss"]
    assert list(one.layout.xaxis.ticktext) == names
    assert len(one.data) == 20  # 24 settings, of which 4 diverged
    heights = {trace.name: trace.y[-1] for trace in one.data}
    found = find(read(tmp_path / "three"))
    order = [group.label for group in found.ranked]
    assert sorted(heights, key=lambda name: heights[name]) == order


def test_a_band_spans_the_seeds_and_lines_say_what_differs(tmp_path: Path) -> None:
    folder = rates(tmp_path / "s")
    traces = figures(folder)["metric-norm"].data
    bands = {trace.name: trace for trace in traces if trace.fill == "toself"}
    assert set(bands) == {"lr=0.02", "lr=0.1", "lr=0.4", "lr=0.8"}
    summaries = [json.loads((folder / str(n) / "summary.json").read_text()) for n in (0, 1)]
    scores = [one["best"]["eval/loss"] for one in summaries]
    assert min(scores) in bands["lr=0.02"].y
    assert max(scores) in bands["lr=0.02"].y
    assert {trace.text[0].strip() for trace in traces if trace.mode == "text"} == set(bands)


def test_the_frame_has_a_row_a_run_and_needs_no_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = troubled(tmp_path / "s")
    pandas = pytest.importorskip("pandas")
    table = frame(folder)
    assert isinstance(table, pandas.DataFrame)
    assert sorted(table.index, key=int) == [str(n) for n in range(10)]
    summary = json.loads((folder / "2" / "summary.json").read_text())
    assert table.loc["2", "best/eval/loss"] == summary["best"]["eval/loss"]
    assert table.loc["2", "grad/norm/p90"] == summary["grad/norm"]["p90"]
    assert table.loc["2", "clip.threshold"] == 1.0
    assert table.loc["7", "state"] == "failed"
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    plain = frame(folder)
    assert [row["run"] for row in plain] == list(table.index)
    assert plain[0]["state"] == table.iloc[0]["state"]


def test_every_section_has_charts_and_every_chart_a_note(tmp_path: Path) -> None:
    found = find(read(sweep(tmp_path / "s", MIXED, steps=60, what_if=(0.1,))))
    for title, charts, _ in sections(found):
        assert title
        assert charts
        assert all(one.note.endswith((".", ". ")) for one in charts)
