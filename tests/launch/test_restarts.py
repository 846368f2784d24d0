"""A run whose rank fails starts again from its last checkpoint (``launch.max_restarts``)."""

import json
import re

import pytest

from tests.launch.ends import started
from tests.process import python

RANKS = ["plugin=ddp", "plugin.nproc=2"]
SHORT = ["train.max_duration=30ba", "eval.interval=10ba", "log.flush=1", "tracker=none"]
SAVING = ["checkpoint.interval=5ba", "checkpoint.asynchronous=false", *SHORT]


def failing(fault, *steps, rank=1):
    model = ["model._target_=tests.launch.failing.Failing", f"+model.fault={fault}"]
    return [*model, f"+model.rank={rank}", f"+model.steps=[{','.join(map(str, steps))}]"]


def rows(folder):
    """Rows without times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    timed = ("time/", "throughput/")
    return [
        {key: value for key, value in line.items() if not key.startswith(timed)} for line in lines
    ]


def whole(environment, tmp_path, *words):
    """The rows of the same run without a failure."""
    folder = tmp_path / "whole"
    words = [*words, *failing("none"), f"hydra.run.dir={folder}"]
    python("-m", "runner", "device=cpu", *words, env=environment)
    return rows(folder)


@pytest.mark.parametrize(
    ("plugin", "rank", "fault", "steps"),
    [
        (RANKS, 1, "kill", [8]),
        (RANKS, 0, "kill", [13, 22]),
        (RANKS, 1, "raise", [3]),
        (["plugin=single"], 0, "kill", [12]),
        (["plugin=fsdp", "plugin.nproc=2"], 1, "exit", [12]),
    ],
)
@pytest.mark.slow
def test_a_run_goes_on_from_its_last_checkpoint(environment, tmp_path, plugin, rank, fault, steps):
    words = [*plugin, *SAVING]
    with started(
        environment, [*words, *failing(fault, *steps, rank=rank), "launch.max_restarts=2"]
    ) as run:
        assert run.process.wait(150) == 0, run.printed
        assert not run.left()
        assert (run.status["state"], run.status["exit_code"]) == ("finished", 0)
        restarts = run.status["restarts"]
        assert [one["rank"] for one in restarts] == [rank] * len(steps)
        assert [one["step"] for one in restarts] == [(step - 1) // 5 * 5 for step in steps]
        assert f"(1 of launch.max_restarts=2): {restarts[0]['error']}" in run.printed
        found = rows(run.folder)
    assert found == whole(environment, tmp_path, *words, "launch.max_restarts=2")


@pytest.mark.slow
def test_an_error_that_repeats_without_progress_ends_the_run(environment):
    words = [*RANKS, *SAVING, *failing("raise", *[8] * 5), "launch.max_restarts=4"]
    with started(environment, words) as run:
        assert run.process.wait(150) == 1, run.printed
        status = run.status
        assert (status["state"], status["rank"], len(status["restarts"])) == ("failed", 1, 1)
        why = "not started again: this error came twice, and both times after step 7\nTraceback"
        assert status["error"].startswith(why)
        assert re.search(r"rank 1 failed: RuntimeError: planted fault", run.printed)


@pytest.mark.parametrize("allowed", [0, 1])
@pytest.mark.product(every=2)
def test_a_run_starts_again_so_often_and_not_more(environment, allowed):
    words = [*RANKS, *SAVING, *failing("kill", 8, 13, 18), f"launch.max_restarts={allowed}"]
    with started(environment, words) as run:
        assert run.process.wait(150) == 1, run.printed
        assert len(run.status.get("restarts", [])) == allowed
        assert "rank 1 was ended by SIGKILL" in run.status["error"]
        used = "not started again: launch.max_restarts=1 is used up\n"
        assert run.status["error"].startswith(used) == bool(allowed)
