"""A run folder says at any moment what was asked and how it stands."""

from __future__ import annotations

import json
import math
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.run_folder import status as module
from runner.run_folder.atomic import write_text
from runner.run_folder.status import Record

CONFIG: dict[str, Any] = {
    "seed": 0,
    "clip": {"mode": "norm", "threshold": 0.25, "norm_type": math.inf, "exclude": ["head.*"]},
    "model": {"_target_": "torch.nn.Linear", "bias": None},
    "tracker": {"mode": "auto"},
    "log": {"interval": 1},
}
STATUS = {
    "state",
    "exit_code",
    "error",
    "rank",
    "config_hash",
    "started",
    "ended",
    "step",
    "wandb_run_id",
    "pid",
    "host",
    "wall_s",
}


def _status(folder: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((folder / "status.json").read_text())
    assert set(status) == STATUS
    return status


def test_the_files_of_a_run_that_finishes(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.begin(CONFIG, "abc", "run1")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == CONFIG
    begun = _status(tmp_path)
    assert begun["state"] == "running"
    assert (begun["config_hash"], begun["wandb_run_id"]) == ("abc", "run1")
    assert begun["ended"] is None

    record.progress(7)
    record.summary({"final": {"train/loss": math.nan}, "steps": 7})
    record.end("finished", 0, None, None)
    ended = _status(tmp_path)
    assert (ended["state"], ended["exit_code"], ended["step"]) == ("finished", 0, 7)
    started, end = (datetime.fromisoformat(ended[key]) for key in ("started", "ended"))
    assert started.utcoffset() is not None
    assert started <= end
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"final": {"train/loss": "NaN"}, "steps": 7}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.yaml",
        "status.json",
        "summary.json",
    ]


def test_a_failed_run_names_rank_and_error(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.begin(CONFIG, "abc", None)
    record.progress(12)
    record.end("failed", 1, "Traceback ...\nValueError: λ", 3)
    status = _status(tmp_path)
    assert (status["state"], status["exit_code"], status["rank"]) == ("failed", 1, 3)
    assert status["error"].endswith("ValueError: λ")
    assert status["step"] == 12


def test_progress_writes_at_most_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    record = Record(tmp_path)
    record.begin(CONFIG, "abc", None)
    for step in range(1, 50):
        now += 0.015
        record.progress(step)
    assert _status(tmp_path)["step"] == 0
    now += 0.5
    record.progress(50)
    assert _status(tmp_path)["step"] == 50


def test_a_continued_run_keeps_its_start_and_adds_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = {"started": "2026-01-01T00:00:00+00:00", "step": 30, "resumed": [30], "wall_s": 100.0}
    now = 5.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    record = Record(tmp_path)
    record.begin(CONFIG, "abc", "run1", resumed)
    now += 7
    record.end("finished", 0, None, None)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["wall_s"] == 107
    assert {key: status[key] for key in ("started", "step", "resumed")} == {
        key: resumed[key] for key in ("started", "step", "resumed")
    }
    assert module.elapsed(status) == status["wall_s"]  # not the years since it was started


def test_a_run_is_unfinished_until_its_summary_is_there(tmp_path: Path) -> None:
    assert not module.is_unfinished(tmp_path)
    record = Record(tmp_path)
    record.begin(CONFIG, "abc", None)
    assert module.is_unfinished(tmp_path)
    record.end("finished", 0, None, None)
    assert module.is_unfinished(tmp_path)
    record.summary({"steps": 1})
    assert not module.is_unfinished(tmp_path)
    record.end("failed", 1, "x", 0)
    assert module.is_unfinished(tmp_path)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    texts = [json.dumps({"fill": str(i) * 200_000}) for i in range(2)]
    write_text(path, texts[0])
    done = threading.Event()

    def write() -> None:
        for i in range(200):
            write_text(path, texts[i % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert path.read_text() in texts
    writer.join()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
