"""Modes whose limit moves, by the command: rows, resume and page."""

import pytest

from runner import report
from tests.launch.ends import rows_of
from tests.process import run_here

SHORT = ["tracker=none", "device=cpu", "eval.interval=1000ba", "data.batch_size=16"]
MODES = {
    "percentile": ["clip=percentile", "clip.threshold=40", "clip.window=12"],
    "zscore": ["clip=zscore", "clip.threshold=1", "clip.warmup_steps=5"],
    "schedule": ["clip=schedule", "clip.warmup_steps=0", "clip.decay=cosine", "clip.steps=40"],
}
SLOW = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("zscore", "schedule")]


def run(folder, *words):
    run_here(*SHORT, *words, f"hydra.run.dir={folder}")
    return rows_of(folder)


@pytest.mark.parametrize("mode", ["percentile", *SLOW])
def test_a_run_that_is_resumed_goes_on_to_the_bit(mode, tmp_path):
    words = [*MODES[mode], "scheduler=constant", "checkpoint.interval=15ba"]
    whole = run(tmp_path / "whole", *words, "train.max_duration=30ba")
    run(tmp_path / "parts", *words, "train.max_duration=15ba")
    part = tmp_path / "parts" / "checkpoints" / "step_000000015"
    second_half = run(tmp_path / "rest", *words, "train.max_duration=30ba", f"resume={part}")
    assert [row for row in second_half if row["train/step"] > 15] == whole[15:]
    limits = {row["train/step"]: row["clip/threshold"] for row in whole if "clip/threshold" in row}
    assert len(set(limits.values())) > 10
    curves = report.figures(tmp_path / "whole")["norm"].data
    [drawn] = [curve for curve in curves if curve.name.startswith(f"threshold of {mode}")]
    assert dict(zip(drawn.x, drawn.y, strict=True)) == pytest.approx(limits)
