"""Runs over the two nodes of a real Slurm, by the script that README shows."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.launch.ends import kill
from tests.process import ROOT, python, wait_for
from tests.slurm import running

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = ["train.max_duration=40ba", "eval.interval=20ba", "log.flush=1", "tracker=none"]
SAVING = ["checkpoint.interval=5ba", "checkpoint.asynchronous=false", *SMALL]


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
        output = f"--output={self.file}"
        self.number = slurm(
            "sbatch", "--parsable", output, *flags, str(script), "device=cpu", *words
        )

    @property
    def printed(self):
        return self.file.read_text() if self.file.exists() else "nothing"

    @property
    def folder(self):
        (folder,) = (self.outputs / "runs").iterdir()
        return folder

    @property
    def status(self):
        return json.loads((self.folder / "status.json").read_text())

    def rows(self):
        found = [*self.outputs.glob("runs/*/metrics.jsonl")]
        return without_times(found[0]) if found else []

    def state(self):
        return re.search(r"JobState=(\w+)", self.slurm.job(self.number))[1]

    def wait_for(self, happened, limit=240):
        wait_for(happened, limit, lambda: self.printed)

    def end(self, limit=240):
        self.wait_for(lambda: self.state() in ("COMPLETED", "FAILED", "CANCELLED"), limit)
        return self.state()


def without_times(file):
    lines = file.read_text().split("\n")[:-1]
    timed = ("time/", "throughput/")
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(timed)}
        for line in lines
    ]


def one_machine(environment, tmp_path, *words):
    folder = tmp_path / "one"
    words = [*words, "plugin.nproc=2", f"hydra.run.dir={folder}"]
    python("-m", "runner", "device=cpu", *words, env=environment)
    return without_times(folder / "metrics.jsonl")


def ranks(number):
    """Processes on this machine of a job that are ranks, by their node."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        variables = dict(line.split("=", 1) for line in lines if "=" in line)
        here = variables.get("SLURM_JOB_ID") == number and "SLURMD_NODENAME" in variables
        if here and b"runner" in (process / "cmdline").read_bytes():
            found.setdefault(variables["SLURMD_NODENAME"], []).append(int(process.name))
    return found


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_one_sbatch_over_two_nodes_is_one_machine(slurm, environment, tmp_path, plugin):
    words = [f"plugin={plugin}", *SMALL]
    job = Job(slurm, tmp_path, *words, "plugin.nproc=1")
    assert job.end() == "COMPLETED", job.printed
    assert (job.status["state"], job.status["exit_code"]) == ("finished", 0)
    assert not [*job.outputs.glob("meetings*")]
    assert job.rows() == one_machine(environment, tmp_path, *words)


def test_one_task_a_rank(slurm, environment, tmp_path):
    words = ["plugin=ddp", *SMALL]
    flags = ["--ntasks-per-node=2"]
    job = Job(slurm, tmp_path, *words, "data.batch_size=16", "plugin.nproc=2", flags=flags)
    assert job.end() == "COMPLETED", job.printed
    one = one_machine(environment, tmp_path, *words, "data.batch_size=32")
    for row, wanted in zip(job.rows(), one, strict=True):
        assert row["grad/norm"] == pytest.approx(wanted["grad/norm"], rel=1e-5)
        assert row["train/loss"] == pytest.approx(wanted["train/loss"], rel=1e-5)


def test_a_lost_node_ends_the_run_and_is_named(slurm, tmp_path):
    words = ["plugin=ddp", "plugin.nproc=1", *SMALL, "train.max_duration=100000ba"]
    job = Job(slurm, tmp_path, *words, "launch.timeout=30")
    job.wait_for(lambda: len(job.rows()) > 5)
    at = time.monotonic()
    for pid in ranks(job.number)["n2"]:
        kill(pid)
    assert job.end() == "FAILED", job.printed
    assert time.monotonic() - at < 30 + 15
    status = job.status
    assert (status["state"], status["exit_code"]) == ("failed", 1), job.printed
    assert (status["rank"], status["node"]) == (1, "n2"), status
    assert "rank 1 on n2 hangs or was killed" in status["error"]


def test_a_rank_that_is_killed_restarts_all_nodes(slurm, environment, tmp_path):
    model = ["model._target_=tests.launch.failing.Failing", "+model.rank=1"]
    words = ["plugin=ddp", *SAVING, *model]
    faults = ["+model.fault=kill", "+model.steps=[8,22]", "launch.max_restarts=3"]
    job = Job(slurm, tmp_path, *words, *faults, "plugin.nproc=1")
    assert job.end(500) == "COMPLETED", job.printed
    assert [(one["rank"], one["step"]) for one in job.status["restarts"]] == [(1, 5), (1, 20)]
    assert job.rows() == one_machine(environment, tmp_path, *words)


def test_a_job_on_two_nodes_that_is_pre_empted_goes_on(slurm, environment, tmp_path):
    words = ["plugin=ddp", *SMALL, "train.max_duration=200ba"]
    job = Job(slurm, tmp_path, *words, "plugin.nproc=1")
    job.wait_for(lambda: len(job.rows()) > 20)
    slurm("scancel", "--signal=USR1", job.number)
    job.wait_for(lambda: "Restarts=1" in slurm.job(job.number))
    slurm.restart(job.number)
    job.wait_for(lambda: job.status["state"] == "finished")
    assert len(job.status["resumed"]) == 1
    assert job.rows() == one_machine(environment, tmp_path, *words)
