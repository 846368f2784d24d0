"""A run folder says at any moment what was asked and how it stands."""

import json
import math
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import datetime
from types import SimpleNamespace

import pytest
import yaml

from runner.config.identity import config_hash
from runner.config.problem import RequestError
from runner.run_folder import status as module
from runner.run_folder.status import Entry, Record, SweepRecord, changed, earlier_run
from runner.run_folder.strict_json import write_text
from tests.launch.ends import read
from tests.process import ROOT

CONFIG = {"seed": 0, "clip": {"norm_type": math.inf, "exclude": ["head.*"]}, "model": None}


def test_a_run_that_begins_says_what_it_is(tmp_path):
    Record(tmp_path).begin(CONFIG, "run1")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == CONFIG
    status = read(tmp_path)
    assert (status["state"], status["ended"]) == ("running", None)
    assert (status["config_hash"], status["wandb_run_id"]) == (config_hash(CONFIG), "run1")


def test_a_run_that_ends_says_when(tmp_path):
    record = Record(tmp_path)
    record.begin(CONFIG, "run1")
    begun = read(tmp_path)
    record.write({"train/step": 7})
    record.end("finished")
    ended = read(tmp_path)
    assert ended.keys() == begun.keys()
    assert (ended["state"], ended["exit_code"], ended["step"]) == ("finished", 0, 7)
    started, end = (datetime.fromisoformat(ended[key]) for key in ("started", "ended"))
    assert started.utcoffset() is not None
    assert started <= end


def test_a_run_is_unfinished_until_its_summary_is_there(tmp_path):
    record = Record(tmp_path)
    assert not module.is_unfinished(tmp_path)
    record.begin(CONFIG, "run1")
    record.end("finished")
    assert module.is_unfinished(tmp_path)
    record.summary({"final": {"train/loss": math.nan}, "steps": 7})
    assert not module.is_unfinished(tmp_path)
    assert read(tmp_path, "summary.json") == {"final": {"train/loss": "NaN"}, "steps": 7}
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"config.yaml", "status.json", "summary.json"}


def test_a_run_that_fails_is_unfinished(tmp_path):
    record = Record(tmp_path)
    record.begin(CONFIG, "run1")
    record.summary({"steps": 7})
    record.end("failed", 1, "Traceback ...\nValueError: λ", rank=3)
    assert module.is_unfinished(tmp_path)
    assert (read(tmp_path)["rank"], read(tmp_path)["error"][-1]) == (3, "λ")


RESUMED = {"started": "2026-01-01T00:00:00+00:00", "step": 30, "resumed": [30], "wall_s": 100.0}


@pytest.fixture
def clock(monkeypatch):
    """The time of a monotonic clock, which a test moves."""
    clock = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.seconds)
    return clock


def test_progress_is_written_once_a_second(tmp_path, clock):
    record = Record(tmp_path)
    record.begin(CONFIG, "run1", **RESUMED)
    for step, seconds, written in ((31, 0.7, 30), (32, 0.2, 30), (33, 0.2, 33)):
        clock.seconds += seconds
        record.write({"train/step": step})
        assert read(tmp_path)["step"] == written


def test_a_continued_run_adds_its_time(tmp_path, clock):
    record = Record(tmp_path)
    record.begin(CONFIG, "run1", **RESUMED)
    assert read(tmp_path).items() >= RESUMED.items()
    clock.seconds += 1.1
    record.end("finished")
    assert read(tmp_path)["wall_s"] == pytest.approx(101.1)


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "status.json"
    done = threading.Event()
    texts = [json.dumps({"fill": str(i) * 200_000}) for i in range(2)]
    write_text(path, texts[0])

    def write():
        for i in range(200):
            write_text(path, texts[i % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert path.read_text() in texts
    writer.join()
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_keeps_the_old_file(tmp_path):
    path = tmp_path / "status.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_objective_is_the_best_where_there_is_one():
    final = {"eval/loss": 0.4, "grad/norm": 3.0, "lost": "Infinity"}
    summary = {"best": {"eval/loss": 0.2}, "final": final, "steps": 9}
    values = {"eval/loss": 0.2, "grad/norm": 3.0, "steps": 9.0, "no": None, "lost": math.inf}
    assert {key: module.objective_of(summary, key) for key in values} == values


def test_a_record_is_not_written_over(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".run.lock").touch()
    assert earlier_run(tmp_path) is None  # it was killed before its record began
    (tmp_path / ".run.lock").unlink()
    for name in ("status.json", "multirun.yaml"):
        (tmp_path / name).touch()
        assert name in earlier_run(tmp_path)
        (tmp_path / name).unlink()


HOLD = """
import sys
from pathlib import Path
from runner.run_folder.status import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()  # until the test closes it
"""


def test_the_second_is_refused_until_the_first_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RELEASED", 0.1)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipes = {"stdin": -1, "stdout": -1}
    holder = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RequestError, match="another process"), module.claimed(tmp_path):
            raise AssertionError
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with module.claimed(tmp_path):
        pass


@pytest.fixture
def record(tmp_path):
    entries = [Entry(0, "0", ["seed=1"], ["seed=1"], "aa"), Entry(1, "1", ["seed=2"], [], "bb")]
    content = {"name": "NaN", "words": ["-m", "seed=1,2"], "request": "cc", "keys": ["seed"]}
    content |= {"objective": "eval/loss", "maximizes": False, "max_failures": None, "total": 2}
    sweep = SweepRecord(**content, entries=entries)
    sweep.entries[0].objective = math.inf
    sweep.write(tmp_path)
    return sweep


def test_a_record_reads_back(record, tmp_path):
    assert SweepRecord.read(tmp_path) == record
    json.loads((tmp_path / "sweep.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.usefixtures("record")
def test_a_record_is_changed_as_a_whole(tmp_path):
    with changed(tmp_path) as current:
        current.of(1).state = "failed"
    with suppress(KeyError), changed(tmp_path) as current:
        current.of(1).state = "finished"
        current.of(2)
    assert SweepRecord.read(tmp_path).of(1).state == "failed"


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('"number": 0', '"number": -1', "runs.0.number"),
        ('"folder": "0"', '"folder": "../0"', "runs.0.folder"),
        ('"number"', '"colour"', "runs.0.number"),
        ("{", "", "sweep.json"),
    ],
)
def test_a_damaged_record_names_what_is_wrong(record, tmp_path, old, new, place):
    file = tmp_path / "sweep.json"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError, match=place):
        SweepRecord.read(tmp_path)
