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
WORDS += ["checkpoint.asynchronous=false"]


@pytest.fixture
def slurm(tmp_path, environment):
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with running(tmp_path / "slurm", environment | {"PATH": path}) as slurm:
        yield slurm


@pytest.fixture
def job(slurm, tmp_path):
    """Start a job on two nodes; return its number, and a function that waits for its status."""
    outputs = Path(slurm.environment["RUNNER_OUTPUTS"])
    printed = tmp_path / "printed"

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


@pytest.fixture
def tasks(slurm, tmp_path):
    """Start a command as two tasks of srun; return the number of its job, and where it prints."""

    def start(command):
        script = tmp_path / "tasks.sh"
        printed = tmp_path / "printed"
        script.write_text(f"#!/bin/bash\nsrun --kill-on-bad-exit=1 bash -c '{command}'\n")
        options = ["--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
        number = slurm("sbatch", "--parsable", f"--output={printed}", *options, str(script))
        return number, printed

    return start


def assert_is_one_machine(environment, tmp_path, *words):
    words = [*words, "plugin.nproc=2", f"hydra.run.dir={tmp_path / 'one'}"]
    run_here(*words, env=environment)
    assert rows_of(only_run(environment["RUNNER_OUTPUTS"])) == rows_of(tmp_path / "one")


def test_tasks_of_srun_are_one_run_that_goes_on_after_a_pre_emption_with_a_grace_time(
    slurm, tasks, environment, tmp_path
):
    words = [*WORDS, "train.max_duration=200ba", "checkpoint.interval=50ba"]
    number, printed = tasks(f"{sys.executable} -m runner {' '.join(words)}")
    runs = Path(environment["RUNNER_OUTPUTS"]) / "runs"

    def reached(step):
        statuses = [read(file.parent) for file in runs.glob("*/status.json")]
        return any(status["step"] > step for status in statuses)

    wait_for(lambda: reached(5), shown=printed.read_text)
    slurm.preempt()
    slurm.restart(number)
    wait_for(lambda: reached(199), shown=printed.read_text)
    wait_for(lambda: "COMPLETED" in slurm.job(number), shown=printed.read_text)
    assert len(read(only_run(runs.parent))["resumed"]) == 1
    assert read(only_run(runs.parent), "summary.json")["world_size"] == 2
    assert_is_one_machine(environment, tmp_path, *words)


@pytest.mark.slow
def test_tasks_of_srun_with_different_commands_are_all_refused(slurm, tasks, environment):
    words = [*WORDS, "clip.threshold=$((SLURM_PROCID+1))"]
    number, printed = tasks(f"{sys.executable} -m runner {' '.join(words)}")
    wait_for(lambda: "FAILED" in slurm.job(number), shown=printed.read_text)
    told = "clip.threshold=1  on rank 0, and 2 on rank 1: start every rank by the same command"
    assert printed.read_text().count(told) == 2  # once on each machine
    assert printed.read_text().count("Exited with exit code 2") == 2
    assert not Path(environment["RUNNER_OUTPUTS"]).exists()


@pytest.mark.slow
def test_a_job_on_two_nodes_that_is_pre_empted_goes_on(slurm, job, environment, tmp_path):
    words = [*WORDS, "train.max_duration=200ba", "checkpoint.interval=50ba"]
    number, status = job(*words)
    status(lambda now: now["step"] > 5)
    slurm("scancel", "--signal=USR1", number)
    slurm.restart(number)
    assert len(status(lambda now: now["state"] == "finished")["resumed"]) == 1
    assert_is_one_machine(environment, tmp_path, *words)


@pytest.mark.slow
def test_a_run_names_the_node_that_hangs(job, environment):
    _, status = job(*WORDS, "checkpoint.interval=5ba", "launch.timeout=20", *faulty("halt"))
    ended = status(lambda now: now["state"] != "running")
    assert (ended["state"], ended["exit_code"]) == ("failed", 1)
    node = Path(environment["RUNNER_OUTPUTS"], "struck").read_text().strip()
    assert node in ("n1", "n2")  # torchrun numbers the ranks as the nodes arrive
    assert (ended["rank"], ended["node"]) == (1, node), ended
    assert f"rank 1 on {node} hangs or was killed" in ended["error"]


@pytest.mark.slow
def test_a_rank_that_is_killed_restarts_all_nodes(job, environment, tmp_path):
    words = [*WORDS, "checkpoint.interval=5ba", "train.max_duration=40ba"]
    _, status = job(*words, *faulty("kill", 8, 22))
    assert status(lambda now: now["state"] == "finished")["resumed"] == [5, 20]
    assert_is_one_machine(environment, tmp_path, *words, *faulty("none"))
