"""Modes whose limit moves, by the command: rows, resume, page, and commands that need a λ."""

import json

import pytest

from runner import report
from runner.cli.main import main
from tests.process import python

SHORT = ["tracker=none", "device=cpu", "eval.interval=1000ba", "data.batch_size=16"]
MODES = {
    "percentile": ["clip=percentile", "clip.threshold=40", "clip.window=12"],
    "zscore": ["clip=zscore", "clip.threshold=1", "clip.warmup_steps=5"],
    "schedule": ["clip=schedule", "clip.warmup_steps=0", "clip.decay=cosine", "clip.steps=40"],
}


def run(folder, *words):
    python("-m", "runner", *SHORT, *words, f"hydra.run.dir={folder}", timeout=200)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "mode",
    [
        "percentile",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("zscore", "schedule")),
    ],
)
def test_a_run_that_is_resumed_goes_on_to_the_bit(mode, tmp_path):
    words = [*MODES[mode], "scheduler=constant", "checkpoint.interval=15ba"]
    whole = run(tmp_path / "whole", *words, "train.max_duration=30ba")
    run(tmp_path / "parts", *words, "train.max_duration=15ba")
    part = tmp_path / "parts" / "checkpoints" / "step_000000015"
    last = run(tmp_path / "rest", *words, "train.max_duration=30ba", f"resume={part}")
    after = [row for row in last if row["train/step"] > 15]
    assert len(after) == 15
    for one, other in zip(whole[15:], after, strict=True):
        for key in ("grad/norm", "grad/norm_clipped", "clip/threshold", "clip/coef", "train/loss"):
            assert one[key] == other[key], (one["train/step"], key)
    limits = {row["train/step"]: row["clip/threshold"] for row in whole if "clip/threshold" in row}
    assert len(set(limits.values())) > 10
    curves = report.figures(tmp_path / "whole")[f"norm-{mode}"].data
    [drawn] = [one for one in curves if one.name.startswith(f"threshold of {mode}")]
    assert dict(zip(drawn.x, drawn.y, strict=True)) == pytest.approx(limits)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["calibrate", "clip=percentile"], ["clip=percentile", "clip=norm"]),
        (["calibrate", "clip=zscore"], ["clip=zscore", "clip=norm"]),
        (["clip=zscore", "clip.what_if=[1]"], ["clip.what_if=[1]"]),
        (["clip=percentile", "clip.threshold=101"], ["clip.threshold=101"]),
        (["clip=percentile", "clip.window=3"], ["clip.window=3"]),
        (["clip=percentile", "clip.history=both"], ["clip.history=both", "raw", "clipped"]),
        (["clip=zscore", "clip.rule=maen"], ["clip.rule=maen", "mean"]),
        (["clip=schedule", "clip.of=nrom"], ["clip.of.mode=nrom", "norm"]),
        (["clip=schedule", "clip.of=none"], ["clip.of.threshold"]),
        (["clip=schedule", "clip.of={mode:adaptive,epz:1}"], ["clip.of.epz=1", "mean eps?"]),
        (["clip=schedule", "clip.of={mode:adaptive,eps:-1}"], ["clip.of.eps=-1"]),
        (["clip=schedule", "clip.of={mode:value,threshold:1}"], ["clip.of.threshold=1"]),
        (["clip=schedule", "clip.of={mode:adaptive,exclude:[haed.*]}"], ["clip.of.exclude"]),
        (["clip=schedule", "clip.decay=cosine"], ["clip.steps"]),
    ],
)
def test_what_is_wrong_is_one_message(words, keys, capsys):
    command = words[0] == "calibrate"
    assert main([*words[:command], *SHORT, *words[command:]]) == 2
    message = capsys.readouterr().err
    assert "(1 problem)" in message
    assert all(key in message for key in keys)
