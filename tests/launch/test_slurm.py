"""Runs over the two nodes of a real Slurm, by the script of launch's README."""

import re
import sys
from pathlib import Path

import pytest

from tests.launch.ends import faulty, only_run, read, rows_of
from tests.process import ROOT, run_here, wait_for
from tests.slurm import running

pytestmark = pytest.mark.xdist_group("slurm")
WORDS = ["device=cpu", "plugin=ddp", "tracker=none", "eval.interval=100ba", "log.flush=1"]
WORDS += ["checkpoint.interval=5ba", "checkpoint.asynchronous=false"]


@pytest.fixture
def slurm(tmp_path, environment):
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with running(tmp_path / "slurm", environment | {"PATH": path}) as slurm:
        yield slurm


@pytest.fixture
def job(slurm, tmp_path):
    """Start a job on two nodes; return its number, and a function that waits for its status."""
    outputs, printed = Path(slurm.environment["RUNNER_OUTPUTS"]), tmp_path / "printed"

    def status(wanted):
        def found():
            return any(wanted(read(file.parent)) for file in outputs.glob("runs/*/status.json"))

        wait_for(found, 240, lambda: printed.read_text() if printed.exists() else "nothing")
        return read(only_run(outputs))

    def start(*words):
        script = tmp_path / "train.sh"
        readme = (ROOT / "runner" / "launch" / "README.md").read_text(encoding="utf-8")
        (text,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", readme, re.DOTALL)
        script.write_text(text)
        command = ["sbatch", "--parsable", f"--output={printed}", str(script), *words]
        return slurm(*command, "plugin.nproc=1"), status

    return start


def assert_is_one_machine(environment, tmp_path, *words):
    words = [*words, "plugin.nproc=2", f"hydra.run.dir={tmp_path / 'one'}"]
    run_here(*words, env=environment)
    assert rows_of(only_run(environment["RUNNER_OUTPUTS"])) == rows_of(tmp_path / "one")


def test_a_job_on_two_nodes_that_is_pre_empted_goes_on(slurm, job, environment, tmp_path):
    words = [*WORDS, "train.max_duration=200ba", "checkpoint.interval=50ba"]
    number, status = job(*words)
    status(lambda now: now["step"] > 5)
    slurm("scancel", "--signal=USR1", number)
    slurm.restart(number)
    assert len(status(lambda now: now["state"] == "finished")["resumed"]) == 1
    assert_is_one_machine(environment, tmp_path, *words)


@pytest.mark.slow
def test_a_node_that_hangs_ends_the_run_and_is_named(job):
    _, status = job(*WORDS, "launch.timeout=20", *faulty("halt"))
    ended = status(lambda now: now["state"] != "running")
    assert (ended["state"], ended["exit_code"]) == ("failed", 1)
    assert (ended["rank"], ended["node"]) == (1, "n2"), ended
    assert "rank 1 on n2 hangs or was killed" in ended["error"]


@pytest.mark.slow
def test_a_rank_that_is_killed_restarts_all_nodes(job, environment, tmp_path):
    words = [*WORDS, "train.max_duration=40ba", *faulty("kill", 8, 22)]
    _, status = job(*words)
    assert status(lambda now: now["state"] == "finished")["resumed"] == [5, 20]
    assert_is_one_machine(environment, tmp_path, *words)
