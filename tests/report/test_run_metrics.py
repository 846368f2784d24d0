from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from runner.report import read_run
from runner.report.run import Run
from runner.report.run_metrics import RunMetrics, diverged_at, measure
from runner.report.series import Series
from tests.report.examples import config, rows, write_run


def of(values: list[float]) -> Run:
    series = Series(np.arange(1.0, len(values) + 1), np.asarray(values))
    return Run(folder=None, number="0", state="finished", series={"train/loss": series})


def approximately(one: RunMetrics, other: RunMetrics) -> None:
    assert one.final == pytest.approx(other.final)
    assert one.best == pytest.approx(other.best)
    assert one.ratio == pytest.approx(other.ratio)
    assert one.norm == pytest.approx(other.norm)
    assert one.coef == pytest.approx(other.coef)
    assert one.skipped == other.skipped


def test_without_a_summary_the_rows_give_the_same_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows(steps=200), config())
    metrics = ["eval/loss", "eval/accuracy", "train/loss"]
    whole = measure(read_run(folder), metrics)
    (folder / "summary.json").unlink()
    approximately(measure(read_run(folder), metrics), whole)
    assert set(whole.final) == set(metrics)


def test_the_summary_holds_where_rows_are_sparse(tmp_path: Path) -> None:
    made = rows(steps=200)
    folder = write_run(tmp_path / "run", made, config())
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[9::10]))
    sparse = measure(read_run(folder), ["eval/loss"])
    assert sparse.ratio == made[-1]["clip/ratio_total"]
    assert sparse.norm["max"] == max(row["grad/norm"] for row in made)


def test_a_run_that_recorded_nothing_has_no_metrics() -> None:
    empty = measure(Run(folder=None, number="0", state="not started"), ["eval/loss"])
    assert empty == RunMetrics({}, {}, None, {}, None, None, None)


def test_a_loss_of_nan_alone_is_a_best_of_nan() -> None:
    lost = measure(of([math.nan, math.nan]), ["train/loss"])
    assert math.isnan(lost.best["train/loss"])
    assert math.isnan(lost.final["train/loss"])
    assert lost.diverged_at == 1


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([2.0, 1.9, 1.5, 1.2], None),
        ([2.0, 1.9, math.nan, 1.2], None),
        ([2.0, 1.9, 9.0, 1.2], None),
        ([2.0, 1.9, 1.5, math.nan], 4),
        ([2.0, 1.9, 9.0, math.inf, math.nan], 3),
        ([2.0, 2.0, 1.0, 1.0, 4.5, 4.6], 5),
        ([], None),
    ],
)
def test_divergence_is_a_loss_that_never_comes_back(values: list[float], step: int | None) -> None:
    assert diverged_at(of(values)) == step
