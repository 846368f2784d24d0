"""One process records the runs of a sweep, and each of them as a process of its own would."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.run_folder.status import is_alive
from runner.telemetry.sinks import recorder_process, wandb_record
from runner.telemetry.sinks.wandb_sink import WandbSink
from tests.process import wait_for


@pytest.fixture(autouse=True)
def _none_is_kept() -> Iterator[None]:
    recorder_process.end_kept()
    yield
    recorder_process.end_kept()


def _sink(folder: Path, run_id: str, **more: Any) -> WandbSink:
    folder.mkdir(exist_ok=True)
    given: dict[str, Any] = {
        "mode": "auto",
        "timeout": 120.0,
        "project": "clips",
        "group": None,
        "tags": [],
        "job_type": "train",
        "name": run_id,
        "run_id": run_id,
        "config": {"seed": 3},
        "more_follow": True,
    }
    return WandbSink(folder, **{**given, **more})


def _run(folder: Path, run_id: str, **more: Any) -> int:
    """Record one run; return the number of the process that did."""
    sink = _sink(folder, run_id, **more)
    process = sink._process
    assert process is not None
    for step in range(1, 4):
        sink.write({"train/step": step, "train/loss": 1 / step})
    sink.close({"steps": 3}, 0)
    return process.pid


def _is_whole(folder: Path, run_id: str) -> bool:
    (file,) = folder.glob(f"wandb/*run-*/run-{run_id}.wandb")
    return wandb_record.has_end(file)


def _kept() -> int:
    (process,) = recorder_process._kept
    return process.pid


def _wait_for_end(pid: int) -> None:
    wait_for(lambda: not is_alive(pid))


def test_one_process_records_all_runs_and_each_record_is_whole_at_once(
    own_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder_process.begin()
    recorders = {_kept()}
    for number in range(3):
        recorders.add(_run(tmp_path / str(number), f"run{number}"))
        assert _is_whole(tmp_path / str(number), f"run{number}")
    assert len(recorders) == 1
    recorder_process.end_kept()
    _wait_for_end(*recorders)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_runs_of_one_process_arrive_online_as_runs_of_their_own(
    start_server: Any, tmp_path: Path
) -> None:
    server = start_server()
    processes = {
        _run(tmp_path / str(number), f"run{number}", config={"seed": number}) for number in (0, 1)
    }
    assert len(processes) == 1
    for number in (0, 1):
        run = server.runs[f"run{number}"]
        assert [row["train/step"] for row in run.history()] == [1, 2, 3]
        assert (run.config["seed"], run.exit_code) == (number, 0)


def test_a_run_that_wandb_refuses_takes_only_its_own_record(
    own_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = _run(tmp_path / "0", "run0")
    assert _run(tmp_path / "1", "run1", project="a/b:c") == first
    assert ["no more of this run" in r.getMessage() for r in caplog.records] == [True]
    assert recorder_process._kept == []
    assert _run(tmp_path / "2", "run2") != first
    assert _is_whole(tmp_path / "2", "run2")


def test_a_process_that_died_between_two_runs_is_replaced(own_home: Path, tmp_path: Path) -> None:
    first = _run(tmp_path / "0", "run0")
    (process,) = recorder_process._kept
    process.kill()
    process.wait(120)
    assert _run(tmp_path / "1", "run1") != first
    assert _is_whole(tmp_path / "1", "run1")


def test_a_process_that_stands_still_is_killed_and_replaced(
    own_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = _run(tmp_path / "0", "run0")
    os.kill(first, signal.SIGSTOP)
    assert _run(tmp_path / "1", "run1", timeout=0.5) == first
    assert ["tracker.timeout" in r.getMessage() for r in caplog.records] == [True]
    _wait_for_end(first)
    assert _run(tmp_path / "2", "run2") != first
    assert _is_whole(tmp_path / "2", "run2")


@pytest.mark.parametrize("changed", ["variable", "folder"])
def test_a_run_in_another_environment_has_another_process(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    first = _run(tmp_path / "0", "run0")
    assert _kept() == first
    if changed == "variable":
        monkeypatch.setenv("WANDB_MODE", "offline")
    else:
        monkeypatch.chdir(tmp_path)
    assert _run(tmp_path / "1", "run1") != first
    _wait_for_end(first)


def test_a_single_run_leaves_no_process(own_home: Path, tmp_path: Path) -> None:
    recorder_process.begin()
    begun = _kept()
    assert _run(tmp_path / "0", "run0", more_follow=False) == begun
    assert _is_whole(tmp_path / "0", "run0")
    assert recorder_process._kept == []
    _wait_for_end(begun)
