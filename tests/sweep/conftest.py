import json
import subprocess
import sys
from pathlib import Path

import pytest


class Command:
    """The command as a user types it, with outputs of its own."""

    def __init__(self, environment: dict[str, str]):
        self.sweeps = Path(environment["RUNNER_OUTPUTS"]) / "sweeps"
        self.environment = environment

    def start(self, *words, before=("-m", "runner")):
        return subprocess.Popen(
            [sys.executable, *before, *words],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *words, code=0, before=("-m", "runner"), limit=150):
        """What it says, on stdout and on stderr."""
        started = self.start(*words, before=before)
        out, err = started.communicate(timeout=limit)
        assert started.returncode == code, out + err
        return out, err

    @property
    def folder(self) -> Path:
        (folder,) = self.sweeps.iterdir()
        return folder

    def record(self):
        return json.loads((self.folder / "sweep.json").read_text())

    def states(self):
        return [run["state"] for run in self.record()["runs"]]


@pytest.fixture
def command(environment):
    return Command(environment)
