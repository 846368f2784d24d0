from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from runner.report.series import layers, read_series, what_if


def written(folder: Path, *lines: str) -> Path:
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_a_missing_or_empty_file_has_no_series(tmp_path: Path) -> None:
    assert read_series(tmp_path / "metrics.jsonl") == {}
    assert read_series(written(tmp_path, "")) == {}


def test_strings_stand_for_numbers_that_are_not_finite(tmp_path: Path) -> None:
    series = read_series(
        written(
            tmp_path,
            '{"train/step": 1, "train/loss": 0.5}',
            '{"train/step": 2, "train/loss": "NaN"}',
            '{"train/step": 3, "train/loss": "Infinity"}',
            '{"train/step": 4, "train/loss": "-Infinity"}',
        )
    )["train/loss"]
    assert series.steps.tolist() == [1, 2, 3, 4]
    assert math.isnan(series.values[1])
    assert series.values[[0, 2, 3]].tolist() == [0.5, math.inf, -math.inf]
    assert series.finite.tolist() == [0.5]


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    series = read_series(
        written(
            tmp_path,
            '{"train/step": 1, "train/loss": 1}',
            "not json",
            "[1, 2]",
            '{"train/loss": 9}',
            '{"train/step": 2, "train/loss": "high"}',
            '{"train/step": 3, "train/loss": 3}',
            '{"train/step": 4, "train/lo',
        )
    )
    assert series["train/loss"].steps.tolist() == [1, 3]


def test_rows_written_again_after_a_resume_replace_the_first(tmp_path: Path) -> None:
    steps = [1, 2, 3, 2, 3, 4]
    lines = [f'{{"train/step": {s}, "train/loss": {i}}}' for i, s in enumerate(steps)]
    loss = read_series(written(tmp_path, *lines))["train/loss"]
    assert loss.steps.tolist() == [1, 2, 3, 4]
    assert loss.values.tolist() == [0, 3, 4, 5]


def test_sparse_keys_keep_their_own_steps(tmp_path: Path) -> None:
    lines = [
        '{"train/step": 1, "train/loss": 1}',
        '{"train/step": 2, "train/loss": 1, "eval/loss": 7, "mine": 3, "other": 4}',
    ]
    series = read_series(written(tmp_path, *lines), frozenset({"mine"}))
    assert series["eval/loss"].steps.tolist() == [2]
    assert series["mine"].values.tolist() == [3]
    assert "other" not in series


def test_thresholds_and_layers_are_found_by_their_keys(tmp_path: Path) -> None:
    line = (
        '{"train/step": 1, "grad/norm": 2, "grad/norm_max": 3, "grad/norm/a.weight": 4, '
        '"clip/what_if/2.0": 0.1, "clip/what_if/0.25": 0.9, "clip/what_if/x": 1}'
    )
    series = read_series(
        written(tmp_path, line, line.replace("0.9", "0.8").replace(": 1,", ": 2,"))
    )
    assert list(layers(series)) == ["a.weight"]
    assert what_if(series) == {0.25: 0.8, 2.0: 0.1}
    assert list(what_if(series)) == [0.25, 2.0]
    assert np.array_equal(series["grad/norm"].values, [2, 2])
