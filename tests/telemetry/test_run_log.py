"""What ``runner.log`` holds of a run."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from runner.telemetry.run_log import RunLog


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "runner")
    return caplog


def test_the_beginning_and_the_end_are_logged(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "runner", "sweep.name=a b"])
    sink = RunLog(Path("/runs/1"), ["seed=1"], {"versions": "python 3.11, torch 2.14"})
    for step in range(1, 5):
        sink.write({"train/step": step, "train/loss": 1 / step, "grad/norm/layer": 1.0})
    sink.write({"train/step": 5, "train/loss": 0.125, "grad/norm": 2.0, "eval/loss": 0.25})
    sink.write({"train/step": 6, "grad/norm": float("nan")})
    sink.close({"guidance": ["Lower the threshold."]}, 0)
    command, overrides, folder, versions, *rest = logged.messages
    assert command == "command: python -m runner 'sweep.name=a b'"
    assert overrides == "overrides of this run: seed=1"
    assert folder.startswith("folder: /runs/1 on ")
    assert versions == "versions: python 3.11, torch 2.14"
    assert rest == [
        "first row: train/step 1  train/loss 1",
        "evaluation: train/step 5  train/loss 0.125  eval/loss 0.25",
        "last row: train/step 6  grad/norm nan",
        "Lower the threshold.",
        "finished with exit code 0; results are in /runs/1",
    ]


@pytest.mark.parametrize(
    ("exit_code", "state"), [(1, "failed"), (130, "interrupted"), (143, "terminated")]
)
def test_a_run_without_rows_still_says_how_it_ended(
    logged: pytest.LogCaptureFixture, exit_code: int, state: str
) -> None:
    RunLog(Path("/runs/1"), [], {}).close(None, exit_code)
    assert "overrides of this run: none" in logged.messages
    assert logged.messages[-1] == f"{state} with exit code {exit_code}; results are in /runs/1"
