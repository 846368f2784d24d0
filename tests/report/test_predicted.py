from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runner.report import read
from runner.report.findings import find
from runner.report.predicted import predict
from tests.report.examples import MIXED, NORM, config, rows, sweep, write_run


def test_without_clipping_the_prediction_is_the_share_of_norms_above(tmp_path: Path) -> None:
    write_run(tmp_path / "0", rows("none", None, 1000, seed=1), config(clip__mode="none"))
    norms = [row["grad/norm"] for row in rows("none", None, 1000, seed=1)]
    for number, threshold in enumerate((0.2, 0.5, 3.0), start=1):
        made = rows("norm", threshold, 1000, seed=1)
        write_run(tmp_path / str(number), made, config(clip__threshold=threshold))
    found = find(read(tmp_path))
    for group in found.groups:
        if group.threshold is not None:
            share = np.mean([norm > group.threshold for norm in norms])
            assert predict(found, "norm").at(group.threshold) == pytest.approx(share, abs=1e-12)
            # The same draws, so here clipping changed no norm: observed is what was predicted.
            assert found.ratio(group) == pytest.approx(share)


def test_a_norm_at_the_threshold_is_not_clipped(tmp_path: Path) -> None:
    made = rows("none", None, 4)
    for row, norm in zip(made, (1.0, 2.0, 2.0, 3.0), strict=True):
        row["grad/norm"] = norm
    write_run(tmp_path / "0", made, config(clip__mode="none", clip__threshold=None))
    assert predict(find(read(tmp_path)), "norm").at(2.0) == 0.25


def test_the_reference_is_the_least_clipped_where_all_clip(tmp_path: Path) -> None:
    found = find(read(sweep(tmp_path / "s", NORM, steps=100)))
    reference = found.reference()
    assert reference is not None
    assert reference.threshold == 2.0


def test_other_modes_are_predicted_by_what_they_recorded(tmp_path: Path) -> None:
    found = find(read(sweep(tmp_path / "s", MIXED, steps=100, what_if=(0.01, 0.1))))
    assert predict(found, "adaptive").thresholds.tolist() == [0.01, 0.1]
    bare = find(read(sweep(tmp_path / "t", MIXED, steps=100)))
    assert predict(bare, "adaptive").at(0.01) is None
