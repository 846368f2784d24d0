"""Runs over the two nodes of a real Slurm, by the script that README shows."""

import re
import sys
from pathlib import Path

import pytest

from tests.launch.ends import faulty, kill, only_run, read, rows_of
from tests.process import ROOT, python, wait_for
from tests.slurm import running

pytestmark = pytest.mark.xdist_group("slurm")

README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = ["device=cpu", "plugin=ddp", "tracker=none", "eval.interval=20ba", "log.flush=1"]
SMALL = [*WORDS, "train.max_duration=40ba"]
LONG = [*WORDS, "train.max_duration=100000ba"]


@pytest.fixture
def slurm(tmp_path, environment):
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with running(tmp_path / "slurm", environment | {"PATH": path}) as slurm:
        yield slurm


class Job:
    """A job that runs README's script on two nodes, with overrides."""

    def __init__(self, slurm, home, *words, flags=()):
        script, self.file = home / "train.sh", home / "printed"
        (text,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", README, re.DOTALL)
        script.write_text(text)
        self.slurm, self.outputs = slurm, Path(slurm.environment["RUNNER_OUTPUTS"])
        command = ["sbatch", "--parsable", f"--output={self.file}", *flags, str(script)]
        self.number = slurm(*command, *words)

    @property
    def printed(self):
        return self.file.read_text() if self.file.exists() else "nothing"

    @property
    def status(self):
        return read(only_run(self.outputs))

    def rows(self):
        return rows_of(only_run(self.outputs))

    def wait_for_rows(self, count):
        files = self.outputs.glob
        self.wait_for(lambda: [*files("runs/*/metrics.jsonl")] and len(self.rows()) > count)

    def wait_for(self, happened):
        wait_for(happened, 240, lambda: self.printed)

    def end(self):
        def state():
            return re.search(r"JobState=(\w+)", self.slurm.job(self.number))[1]

        self.wait_for(lambda: state() in ("COMPLETED", "FAILED", "CANCELLED"))
        return state()


def one_machine(environment, tmp_path, *words):
    folder = tmp_path / "one"
    words = [*words, "plugin.nproc=2", f"hydra.run.dir={folder}"]
    python("-m", "runner", *words, env=environment)
    return rows_of(folder)


def ranks(number, node):
    """Processes on this machine that are ranks of a job on a node."""
    mark = {f"SLURM_JOB_ID={number}".encode(), f"SLURMD_NODENAME={node}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = set((process / "environ").read_bytes().split(b"\0"))
            if mark <= variables and b"runner" in (process / "cmdline").read_bytes():
                yield int(process.name)
        except OSError:
            continue


def test_a_job_on_two_nodes_that_is_pre_empted_goes_on(slurm, environment, tmp_path):
    words = [*SMALL, "train.max_duration=200ba"]
    job = Job(slurm, tmp_path, *words, "plugin.nproc=1")
    job.wait_for_rows(20)
    slurm("scancel", "--signal=USR1", job.number)
    job.wait_for(lambda: "Restarts=1" in slurm.job(job.number))
    slurm.restart(job.number)
    job.wait_for(lambda: job.status["state"] == "finished")
    assert len(job.status["resumed"]) == 1
    assert not [*job.outputs.glob("meetings*")]
    assert job.rows() == one_machine(environment, tmp_path, *words)


@pytest.mark.slow
def test_one_task_a_rank(slurm, environment, tmp_path):
    words = [*SMALL, "data.batch_size=16", "plugin.nproc=2"]
    job = Job(slurm, tmp_path, *words, flags=["--ntasks-per-node=2"])
    assert job.end() == "COMPLETED", job.printed
    one = one_machine(environment, tmp_path, *SMALL, "data.batch_size=32")
    for row, wanted in zip(job.rows(), one, strict=True):
        assert row["grad/norm"] == pytest.approx(wanted["grad/norm"], rel=1e-5)
        assert row["train/loss"] == pytest.approx(wanted["train/loss"], rel=1e-5)


@pytest.mark.slow
def test_a_lost_node_ends_the_run_and_is_named(slurm, tmp_path):
    job = Job(slurm, tmp_path, "plugin.nproc=1", *LONG, "launch.timeout=30")
    job.wait_for_rows(5)
    for pid in ranks(job.number, "n2"):
        kill(pid)
    assert job.end() == "FAILED", job.printed
    status = job.status
    assert (status["state"], status["exit_code"]) == ("failed", 1), job.printed
    assert (status["rank"], status["node"]) == (1, "n2"), status
    assert "rank 1 on n2 hangs or was killed" in status["error"]


@pytest.mark.slow
def test_a_rank_that_is_killed_restarts_all_nodes(slurm, environment, tmp_path):
    words = [*SMALL, "checkpoint.interval=5ba", "checkpoint.asynchronous=false"]
    faults = [*faulty("kill", 8, 22), "launch.max_restarts=3"]
    job = Job(slurm, tmp_path, *words, *faults, "plugin.nproc=1")
    assert job.end() == "COMPLETED", job.printed
    assert job.status["resumed"] == [5, 20]
    assert job.rows() == one_machine(environment, tmp_path, *words)
