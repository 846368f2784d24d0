import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import wandb

from runner.cli.main import main
from runner.models.cnn import DigitsCNN
from tests.launch.ends import read, rows_of
from tests.launch.test_secrets import Planted
from tests.process import environment_at, python, run_here

SMALL = ["device=cpu", "data.batch_size=16", "log.flush=1"]
SIX = [*SMALL, "train.max_duration=6ba"]
PLAIN = ["-m", "plugin=single,ddp", "clip=norm", "clip.threshold=0.1,1", *SIX]


class Net(DigitsCNN):
    """Does what the file with its number says: ``raise``, ``kill``, ``nan``, ``wait``, ``meet``."""

    def __init__(self, marks, number, **options):
        super().__init__(**{"num_classes": 10, "width": 32} | options)
        mark = Path(marks, str(number))
        self.passes = 0
        self.here = mark
        self.fault = mark.read_text() if mark.exists() else ""

    def forward(self, images):
        if not images.is_meta:
            self.passes += self.training
            if self.fault == "kill" and self.passes == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "raise":
                raise ValueError("planted fault")
            if self.fault == "wait":
                self.here.with_suffix(".here").touch()
                while self.here.exists():
                    time.sleep(0.02)
            if self.fault == "meet":
                self.here.with_suffix(".here").touch()
                marks = [path for path in self.here.parent.iterdir() if not path.suffix]
                while not all(path.with_suffix(".here").exists() for path in marks):
                    time.sleep(0.02)
        outputs = super().forward(images)
        return outputs * float("nan") if self.fault == "nan" else outputs


class Command:
    """The command as a user types it, with outputs of its own, and the marks of its networks."""

    def __init__(self, environment):
        self.sweeps = Path(environment["RUNNER_OUTPUTS"]) / "sweeps"
        self.environment = environment
        self.marks = self.sweeps.parent.parent / "marks"
        self.marks.mkdir()

    def net(self, number, **faults):
        """Overrides for networks with numbers of their own, and faults by number."""
        for name, fault in faults.items():
            (self.marks / name.strip("n")).write_text(fault)
        return ["model._target_=tests.sweep.conftest.Net", f"+model.marks={self.marks}", number]

    def start(self, *words):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "runner", *words]
        return subprocess.Popen(command, env=self.environment, start_new_session=True, **pipes)

    def __call__(self, *words, code=0, before=("-m", "runner")):
        """What it says, on stdout and on stderr."""
        done = python(*before, *words, code=code, env=self.environment)
        return done.stdout, done.stderr

    def has_rows(self, number):
        files = self.sweeps.glob(f"*/{number}/metrics.jsonl")
        return any(file.stat().st_size for file in files)

    @property
    def folder(self):
        (folder,) = self.sweeps.iterdir()
        return folder

    def record(self):
        return read(self.folder, "sweep.json")

    def states(self):
        return [run["state"] for run in self.record()["runs"]]


@pytest.fixture
def command(environment):
    return Command(environment)


@pytest.fixture
def here(command, outputs, capsys):
    """The same command in this process."""

    def run(*words, code=0):
        assert main(words) == code
        return capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A finished sweep of four runs with secrets, which wandb records; it printed ``said``."""
    planted = Planted()
    home = environment_at(tmp_path_factory.mktemp("plain"))
    command = Command(home | planted.variables)
    command.words = [*PLAIN, "tracker.mode=offline", "sweep.name=mine", *planted.words]
    command.said = run_here(*command.words, env=command.environment)
    wandb.teardown()  # other tests have another home
    command.planted = planted
    return command


def results(folder):
    """What a sweep came to: for each run its overrides, its state, its values and its rows."""
    record = read(folder, "sweep.json")
    assert record["state"] == "finished"
    kept = ("number", "folder", "overrides", "state", "exit_code", "objective", "clip_ratio")
    return [[run[key] for key in kept] + rows_of(folder / run["folder"]) for run in record["runs"]]
