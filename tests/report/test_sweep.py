from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runner.report import NoRunError, read, read_sweep
from tests.report.examples import NORM, config, rows, sweep, troubled, write_run


def test_runs_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 2, 0):
        write_run(tmp_path / str(number), rows(steps=3), config())
    (tmp_path / "notes").mkdir()
    assert [run.number for run in read(tmp_path).runs] == ["0", "2", "9", "10"]


def test_a_folder_with_a_status_is_one_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows(steps=3), config(), overrides=("seed=3", "a=b c"))
    found = read(folder)
    assert found.single
    assert found.command == "python -m runner seed=3 'a=b c'"


def test_run_folders_are_the_truth_where_the_record_is_stale(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", NORM, steps=10)
    record = json.loads((folder / "sweep.json").read_text())
    for entry in record["runs"]:
        entry |= {"state": "running", "error": "old"}
    (folder / "sweep.json").write_text(json.dumps(record))
    runs = read(folder).runs
    assert [run.state for run in runs] == ["finished"] * 4
    assert [run.error for run in runs] == [None] * 4
    (folder / "sweep.json").write_text("{torn")
    assert len(read(folder).runs) == 4


def test_planned_runs_without_a_folder_are_listed(tmp_path: Path) -> None:
    runs = read_sweep(troubled(tmp_path / "s")).runs
    assert len(runs) == 10
    assert runs[9].state == "not started"
    assert runs[9].folder is None
    assert runs[9].threshold == 16


def test_a_run_that_recorded_nothing_has_its_cause_from_the_sweep(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", NORM[:2], steps=10)
    shutil.rmtree(folder / "1")
    (folder / "1").mkdir()
    record = json.loads((folder / "sweep.json").read_text())
    record["runs"][1] |= {"state": "failed", "error": "out of memory"}
    (folder / "sweep.json").write_text(json.dumps(record))
    run = read(folder).runs[1]
    assert (run.state, run.error) == ("failed", "out of memory")
    assert run.overrides == ("clip=norm", "clip.threshold=0.25")


def test_the_command_is_what_was_typed(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", NORM[:1], steps=3)
    typed = "python -m runner -m clip=norm clip.threshold=0.1,0.25,1.0,2.0"
    assert read(folder).command == typed
    (folder / "sweep.json").unlink()
    assert read(folder).command is None
    task = "hydra: {overrides: {task: ['clip.threshold=0.1,1']}}"
    (folder / "multirun.yaml").write_text(task)
    assert read(folder).command == "python -m runner -m clip.threshold=0.1,1"


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "data.csv").write_text("")
    with pytest.raises(NoRunError, match="holds no run"):
        read(tmp_path)
