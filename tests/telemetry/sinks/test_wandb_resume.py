"""A run that continues goes on in its wandb run, and no row arrives twice.

wandb's own ``sync`` sends the records; the server keeps what arrived, by the offsets of the client.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.run_folder.rows import Row
from runner.telemetry.sinks.wandb_sink import WandbSink


def _sink(folder: Path, **more: Any) -> WandbSink:
    folder.mkdir(exist_ok=True)
    given: dict[str, Any] = {
        "mode": "auto",
        "timeout": 120.0,
        "project": "clips",
        "group": None,
        "tags": [],
        "job_type": "train",
        "name": "run",
        "run_id": "again1",
        "config": {"seed": 3},
    }
    return WandbSink(folder, **{**given, **more})


def _rows(first: int, last: int) -> list[Row]:
    return [{"train/step": step, "train/loss": 1 / step} for step in range(first, last + 1)]


def _record(folder: Path, first: int, last: int, exit_code: int, **more: Any) -> None:
    sink = _sink(folder, **more)
    for row in _rows(first, last):
        sink.write(row)
    sink.close({"steps": last}, exit_code)


def _sync(*records: Path) -> None:
    words = [sys.executable, "-m", "wandb", "sync", *map(str, records)]
    home = os.environ["HOME"]  # it writes a log beside
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr


def _assert_whole(run: Any) -> None:
    """Twelve rows, each once, in order, under ``_step`` of their own."""
    assert [row["train/step"] for row in run.history()] == list(range(1, 13))
    assert [row["train/loss"] for row in run.history()] == pytest.approx(
        [1 / step for step in range(1, 13)]
    )
    own = [run.rows[at]["_step"] for at in sorted(run.rows)]
    assert own == sorted(set(own))
    assert run.exit_code == 0
    assert run.summary["steps"] == 12


def test_a_run_continues_online_where_it_was(
    start_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server()
    _record(tmp_path / "run", 1, 8, exit_code=1)
    # The checkpoint is of step 5: three steps are taken again.
    _record(tmp_path / "run", 6, 12, exit_code=0, sent_until=8, resumes=True)
    assert list(server.runs) == ["again1"]
    _assert_whole(server.runs["again1"])
    assert caplog.records == [one for one in caplog.records if one.levelname == "INFO"]


def test_a_run_continues_in_a_record_that_wandb_sync_appends(
    start_server: Any, tmp_path: Path
) -> None:
    server = start_server()
    folder = tmp_path / "run"
    _record(folder, 1, 8, exit_code=1, mode="offline")
    _record(folder, 6, 12, exit_code=0, sent_until=8, resumes=True, mode="offline")
    records = sorted(one for one in (folder / "wandb").glob("offline-run-*") if one.is_dir())
    assert len(records) == 2
    _sync(*records)
    _assert_whole(server.runs["again1"])


@pytest.mark.slow
def test_a_run_that_began_online_continues_offline(
    start_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    folder = tmp_path / "run"
    _record(folder, 1, 8, exit_code=1)
    server.fault = 500
    _record(folder, 6, 12, exit_code=0, sent_until=8, resumes=True)
    begun = [one for one in (folder / "wandb").glob("run-*") if one.is_dir()]
    assert len(begun) == 1  # that of the first part is kept
    server.fault = None
    _sync(*(folder / "wandb").glob("offline-run-*"))
    _assert_whole(server.runs["again1"])
