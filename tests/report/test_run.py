from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.report import NoRunError, read_run
from runner.report.run import flat
from runner.run_folder.status import is_alive
from tests.report.examples import NO_SUCH_PROCESS, config, rows, write_run


def changed(folder: Path, **status: object) -> Path:
    file = folder / "status.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **status}))
    return folder


@pytest.fixture
def running(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rows(steps=20), config(), state="running")


def test_a_run_whose_process_is_gone_was_killed(running: Path) -> None:
    assert read_run(running).state == "killed"


def test_a_run_whose_process_lives_is_running(running: Path) -> None:
    assert read_run(changed(running, pid=os.getpid())).state == "running"


def test_a_process_of_another_machine_is_taken_by_its_word(running: Path) -> None:
    assert read_run(changed(running, host="elsewhere.example")).state == "running"


def test_a_process_that_ended_and_was_not_reaped_does_not_live() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert ended.stdout is not None
    # Its output closes as it ends; until wait() it stays in the table of processes.
    ended.stdout.read()
    ended.stdout.close()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(ended.pid)
    ended.wait()
    assert not is_alive(NO_SUCH_PROCESS)
    assert is_alive(os.getpid())


@pytest.mark.parametrize("state", ["finished", "failed", "interrupted"])
def test_a_recorded_end_stands_whatever_its_process(tmp_path: Path, state: str) -> None:
    folder = write_run(tmp_path / "run", rows(steps=5), config(), state=state)
    assert read_run(folder).state == state


def test_wall_time_is_the_summarys_else_from_start_to_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows(steps=100), config())
    assert read_run(folder).seconds == pytest.approx(3.1)
    (folder / "summary.json").unlink()
    assert read_run(folder).seconds == pytest.approx(12.5)
    assert read_run(changed(folder, started="2026-11-21T04:00:02")).seconds == pytest.approx(10.5)
    assert read_run(changed(folder, ended=None)).seconds is None


@pytest.mark.parametrize("name", ["status.json", "summary.json", "config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("damage", ["", '{"a": ', "\x00\x01", None])
def test_a_missing_or_damaged_file_is_done_without(
    tmp_path: Path, name: str, damage: str | None
) -> None:
    folder = write_run(tmp_path / "run", rows(steps=20), config())
    if damage is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(damage)
    run = read_run(folder)
    assert run.steps == 20
    assert run.state == ("unknown" if name == "status.json" else "finished")


def test_configuration_falls_back_to_what_hydra_wrote(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [], config(clip__threshold=0.25))
    (folder / "config.yaml").rename(folder / ".hydra" / "config.yaml")
    run = read_run(folder)
    assert (run.mode, run.threshold) == ("norm", 0.25)


def test_words_tell_mode_and_threshold_where_nothing_else_does(tmp_path: Path) -> None:
    words = ("clip=adaptive", "clip.threshold=0.01")
    folder = write_run(tmp_path / "run", [], {}, overrides=words)
    run = read_run(folder)
    assert (run.mode, run.threshold) == ("adaptive", 0.01)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match="nowhere: no such folder"):
        read_run(tmp_path / "nowhere")


def test_nested_keys_are_dotted() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
    assert flat("text") == {}
