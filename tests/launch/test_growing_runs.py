"""Runs whose ``accumulation.steps`` have phases: what goes on, and what the page shows."""

import random

import pytest

from tests.kept import assert_same_checkpoint
from tests.launch.ends import rows_of
from tests.process import run_here

SHORT = ["tracker=none", "device=cpu", "eval.interval=1000ba", "data.batch_size=16"]
SHORT += ["accumulation.steps={0:1,6ba:2,14ba:4}", "scheduler.by=samples"]
WAYS = {
    "workers": ["data.num_workers=2"],
    "plateau": [
        "scheduler=plateau",
        "scheduler.patience=1",
        "scheduler.by=steps",
        "eval.interval=2ba",
    ],
    "fsdp": ["plugin=fsdp", "plugin.nproc=2", "data.batch_size=8"],
}


def run(folder, *words):
    typed = {word.partition("=")[0] for word in words}
    defaults = [word for word in SHORT if word.partition("=")[0] not in typed]
    run_here(*defaults, *words, f"hydra.run.dir={folder}")
    return rows_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_resumed_inside_any_phase_goes_on_to_the_bit(way, tmp_path):
    words = [*WAYS[way], "checkpoint.interval=1ba", "checkpoint.keep=30", "train.max_duration=24ba"]
    whole = run(tmp_path / "whole", *words)
    sizes = {row["train/step"]: row["train/step_samples"] for row in whole}
    assert [sizes[step] for step in (6, 7, 14, 15)] == [16, 32, 32, 64]
    chosen = random.Random(5)
    for first, end in ((1, 6), (6, 14), (14, 24)):
        step = chosen.randrange(first, end)
        part = tmp_path / "whole" / "checkpoints" / f"step_{step:09d}"
        rest = tmp_path / f"rest{step}"
        rows = run(rest, *words, f"resume={part}")
        assert [row for row in rows if row["train/step"] > step] == whole[step:]
        finals = [folder / "checkpoints" / "final" for folder in (rest, tmp_path / "whole")]
        assert_same_checkpoint(*finals)


@pytest.mark.slow
def test_the_page_of_a_sweep_names_phases_as_they_were_typed(tmp_path):
    sweep = ["-m", "accumulation.steps={0:1,3ba:2},2", "train.max_duration=6ba"]
    run_here(*SHORT[:4], *sweep, f"hydra.sweep.dir={tmp_path}")
    page = (tmp_path / "report.html").read_text()
    assert "{0:1,3ba:2}" in page
    assert "accumulation.steps.0" not in page
