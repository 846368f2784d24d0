"""wandb gets every row, offline or online, and no server and no process can hold a run up."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.run_folder.rows import JsonlSink, Row, read_rows
from runner.run_folder.status import is_alive
from runner.run_folder.strict_json import decode
from runner.telemetry.sinks import recorder_process, wandb_sink
from runner.telemetry.sinks.wandb_record import has_end
from runner.telemetry.sinks.wandb_sink import WandbSink
from tests.process import ROOT, python, wait_for

pytestmark = pytest.mark.xdist_group("wandb")

CONFIG = {"seed": 3, "clip": {"mode": "norm", "threshold": 0.25, "exclude": ["head.*"]}}
CONFIG |= {"model": {"_target_": "torch.nn.Linear", "bias": None}}
SUMMARY = {"final": {"eval/loss": 0.125, "train/loss": math.nan}, "steps": 6}
SUMMARY |= {"grad/norm": {"p50": 1 / 3, "max": math.inf}, "clip/ratio_total": 0.5}
ROWS = [
    {"train/step": 1, "train/loss": 2.0, "grad/norm": 1 / 3, "clip/clipped": 1},
    {"train/step": 2, "train/loss": 1e-9, "grad/norm": 12345678.901234567, "clip/clipped": 1},
    {"train/step": 3, "train/loss": math.nan, "grad/norm": math.inf, "clip/clipped": 0},
    {"train/step": 4, "train/loss": -math.inf, "grad/norm/head.weight": 0.1, "clip/clipped": 0},
    {"train/step": 5, "train/loss": 0.1, "eval/loss": 0.3, "eval/accuracy": 0.975},
    {"train/step": 6, "train/loss": 0.3},
]


@dataclass
class Wandb:
    """Sinks of one test, and what they recorded."""

    _caplog: Any

    @property
    def warnings(self):
        return [r.getMessage() for r in self._caplog.records if r.levelno >= logging.WARNING]

    def sink(self, folder, run_id, **more):
        folder.mkdir(exist_ok=True)
        about = {"project": "clips", "group": "sweep", "tags": ["a", "b"], "job_type": "train"}
        given: dict[str, Any] = about | {"mode": "auto", "timeout": 120.0, "name": "clip=norm"}
        return WandbSink(folder, run_id=run_id, **given | {"config": CONFIG} | more)

    def run(self, folder, run_id, rows=ROWS, **more):
        """Record a whole run; return its file."""
        summary, exit_code = more.pop("summary", SUMMARY), more.pop("exit_code", 0)
        sink = self.sink(folder, run_id, **more)
        for row in rows:
            sink.write(row)
        sink.close(summary, exit_code)
        return self.file(folder, run_id)

    def file(self, folder, run_id):
        return sorted(folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb"))[-1]

    def records(self, file, kind):
        """Return the records of one kind, as the reader of wandb's command line finds them."""
        words = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        return [record[kind] for record in found if record["type"] == kind]

    def history(self, file):
        """Return the rows, without wandb's own keys."""
        items = [decode(json.dumps(one["item"])) for one in self.records(file, "history")]
        return [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]

    def recorder(self):
        """Return the number of the process that will record the next run."""
        process = recorder_process.take()
        recorder_process.keep(process)
        return process.pid


@pytest.fixture
def wandb(own_home, caplog, monkeypatch):
    """Sinks whose servers may take their time, on a busy machine too."""
    for limit in ("INIT_SECONDS", "FINISH_SECONDS", "STALLED_SECONDS"):
        monkeypatch.setattr(wandb_sink, limit, 120.0)
    recorder_process.end_kept()
    yield Wandb(caplog)
    recorder_process.end_kept()


def assert_same(got, expected):
    assert [set(row) for row in got] == [set(row) for row in expected]
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6, nan_ok=True)


KEY = "local-" + "a" * 40


def test_offline_one_process_records_all_runs_whole(wandb, tmp_path, monkeypatch):
    recorder_process.begin()
    begun = wandb.recorder()
    monkeypatch.chdir(tmp_path)  # where wandb looks for its settings: another process is needed
    pid = wandb.recorder()
    wait_for(lambda: not is_alive(begun))
    with JsonlSink(tmp_path / "rows.jsonl") as rows:
        for row in ROWS:
            rows.write(row)
    ended = wandb.run(tmp_path / "0", "ended", more_follow=True)
    assert wandb.recorder() == pid
    many = [{"train/step": n, **{f"grad/norm/{k}": k / 7 for k in range(2000)}} for n in range(4)]
    failed = wandb.run(tmp_path / "1", "failed", many, summary=None, exit_code=1)
    wait_for(lambda: not is_alive(pid))  # after a single run, or the last one, no process is left
    assert wandb.warnings == []
    assert {path.name for path in (tmp_path / "0").iterdir()} == {"wandb"}

    assert_same(wandb.history(ended), list(read_rows(tmp_path / "rows.jsonl")))
    [run] = wandb.records(ended, "run")
    assert {k: v for k, v in run["config"]["update"].items() if k != "_wandb"} == CONFIG
    assert (run["run_id"], run["project"], run["run_group"]) == ("ended", "clips", "sweep")
    assert (run["job_type"], run["tags"], run["display_name"]) == ("train", ["a", "b"], "clip=norm")
    metrics = {key: value for one in wandb.records(ended, "metric") for key, value in one.items()}
    assert (metrics["glob_name"], metrics["step_metric"]) == ("*", "train/step")
    last = {k: v for one in wandb.records(ended, "summary") for k, v in one["update"].items()}
    assert last["grad/norm/p50"] == pytest.approx(1 / 3)
    assert (last["train/loss"], last["grad/norm/max"]) == ("NaN", "Infinity")
    assert (last["eval/loss"], last["steps"]) == (0.125, 6)
    assert not [key for key in last if key.startswith("final/")]

    for file, code in ((ended, 0), (failed, 1)):
        assert [one.get("exit_code", 0) for one in wandb.records(file, "exit")] == [code]
        content = file.read_bytes()
        assert has_end(file)
        for size in [*range(len(content) - 100, len(content)), *range(0, len(content) - 100, 997)]:
            file.write_bytes(content[:size])
            assert not has_end(file)
    assert len(content) > 3 * 2**15


def test_runs_arrive_online_each_as_its_own_even_at_once(start_server, wandb, tmp_path):
    server = start_server()
    more: list[Row] = [{"train/step": step, "grad/norm": 1 / step} for step in range(7, 1000)]
    first = wandb.sink(tmp_path / "1", "first", more_follow=True)
    wandb.run(tmp_path / "2", "second", ROWS[:1], config={"seed": 2}, exit_code=1)
    for row in ROWS + more:
        first.write(row)
    first.close(SUMMARY, 3)
    pid = wandb.recorder()
    wandb.run(tmp_path / "3", "third", ROWS[1:2], config={"seed": 3}, more_follow=True)
    assert wandb.recorder() == pid
    expected = {"first": (3, ROWS + more), "second": (1, ROWS[:1]), "third": (0, ROWS[1:2])}
    assert set(server.runs) == set(expected)
    for name, (code, rows) in expected.items():
        assert server.runs[name].exit_code == code
        assert_same(server.runs[name].history(), rows)
    run = server.runs["first"]
    assert (run.config, server.runs["second"].config) == (CONFIG, {"seed": 2})
    assert run.summary["grad/norm/p50"] == pytest.approx(1 / 3)
    assert (run.created["groupName"], run.created["tags"]) == ("sweep", ["a", "b"])
    assert wandb.warnings == []


@pytest.mark.parametrize(
    ("fault", "more", "said"),
    [
        (401, {}, "recorded offline"),
        ("hang", {}, "recorded offline"),
        ("refused", {}, "recorded offline"),
        ("no key", {}, "recorded offline"),
        ("hang", {"answered": 1}, "wandb sync"),
        ("hang", {"only": "file_stream"}, "did not send"),
        (500, {"only": "file_stream"}, "did not send"),
    ],
)
def test_a_server_that_fails_holds_nothing_up(
    fault, more, said, start_server, wandb, tmp_path, monkeypatch
):
    for limit in ("INIT_SECONDS", "FINISH_SECONDS")["only" in more :]:
        monkeypatch.setattr(wandb_sink, limit, 1.5)
    server = start_server(fault if fault in (401, 500, "hang") else None, **more)
    if fault == "refused":
        server.close()
    elif fault == "no key":
        monkeypatch.delenv("WANDB_API_KEY")
    file = wandb.run(tmp_path / "run", "failing1", mode="online", exit_code=1)
    [warning] = wandb.warnings
    assert said in warning
    [begun] = [path.name for path in file.parents[1].glob("*run-*") if not path.is_symlink()]
    assert begun.startswith("offline-run-") or "offline" not in said
    wait_for(lambda: has_end(file))
    assert_same(wandb.history(file), ROWS)
    assert [one["exit_code"] for one in wandb.records(file, "exit")] == [1]


def test_a_flood_of_rows_holds_nothing_up(start_server, wandb, tmp_path, monkeypatch):
    """Behind some ten megabytes for a server that hangs, wandb forgets its own time limits."""
    monkeypatch.setattr(wandb_sink, "FINISH_SECONDS", 1.0)
    server = start_server()
    sink = wandb.sink(tmp_path / "run", "flood1")
    sink.write({"train/step": 0})
    wait_for(lambda: server.runs)
    server.fault = "hang"
    layers = {f"grad/norm/blocks.{i}.weight": 1 / (i + 3) for i in range(1000)}
    for step in range(1, 499):
        sink.write({"train/step": step, **layers})
    # The file is written in blocks, of which this row fills some.
    sink.write({"train/step": 499, **{f"last/{i}": 1 / (i + 3) for i in range(3000)}})
    wait_for(lambda: b"last/" in wandb.file(tmp_path / "run", "flood1").read_bytes())
    sink.close(None, 0)
    assert len(wandb.warnings) == 1
    file = wandb.file(tmp_path / "run", "flood1")
    wait_for(lambda: has_end(file))
    assert [row["train/step"] for row in wandb.history(file)] == list(range(500))


PROGRAM = """
import os, signal, sys
from pathlib import Path
from runner.telemetry.sinks import recorder_process, wandb_sink
how = sys.argv[1]
wandb_sink.INIT_SECONDS = wandb_sink.FINISH_SECONDS = 120
recorder_process.begin()
if how != "early":
    sink = wandb_sink.WandbSink(
        Path.cwd(), mode="auto", timeout=120, project="p", group=None, tags=[], job_type="train",
        name="n", run_id="program1", config={"seed": 0})
    sink.write({"train/step": 1})
    sink.write({"train/step": 2, "last/row": 1.0})
if os.fork() == 0:  # a loader's worker, which holds the pipe open until the test closes its input
    os.read(0, 1)
    os._exit(0)
if how == "early":
    print(recorder_process.take().pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if how == "waits":
    os.read(0, 1)
sink.close(None, 0)
"""


def program(folder, how):
    folder.mkdir()
    words = [sys.executable, "-c", PROGRAM, how, "planted-as-an-argument"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(words, cwd=folder, env=env, text=True, **pipes)


def test_a_trainer_that_is_killed_leaves_a_failed_run_and_no_process(wandb, tmp_path):
    folder = tmp_path / "run"
    with program(folder, "waits") as started:
        files = "wandb/*run-*/run-program1.wandb"
        wait_for(lambda: any(b"last/row" in one.read_bytes() for one in folder.glob(files)))
        file = wandb.file(folder, "program1")
        started.kill()
        wait_for(lambda: has_end(file))
    assert [row["train/step"] for row in wandb.history(file)] == [1, 2]
    assert [one["exit_code"] for one in wandb.records(file, "exit")] == [1]
    with program(tmp_path / "early", "early") as started:  # before its recorder has begun
        recorder = int(started.stdout.readline())
        wait_for(lambda: not is_alive(recorder))


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_no_secret_and_no_argument_is_recorded(start_server, wandb, tmp_path, monkeypatch, mode):
    server = start_server()
    monkeypatch.setenv("PLANTED_TOKEN", "planted-in-the-environment")
    monkeypatch.setenv("WANDB_MODE", mode)
    with program(tmp_path / "run", "ends") as started:
        assert started.wait(120) == 0
    assert [run.exit_code for run in server.runs.values()] == [0] * (mode == "online")
    assert bool(server.requests) == (mode == "online")
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) > 1
    for text in [*written, *server.bodies]:
        assert b"planted" not in text
        assert os.environ["WANDB_API_KEY"].encode() not in text


@pytest.mark.parametrize(
    ("trouble", "warning"),
    [
        ("dies between runs", None),
        ("dies in a run", "ended unexpectedly"),
        ("stands still", "tracker.timeout"),
        ("refuses the run", "no more of this run"),
    ],
)
def test_a_process_that_fails_costs_its_own_run_alone(
    wandb, tmp_path, monkeypatch, trouble, warning
):
    wandb.run(tmp_path / "0", "run0", more_follow=True)
    first = wandb.recorder()
    if trouble == "dies between runs":
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not is_alive(first))
    else:
        project = "a/b:c" if trouble == "refuses the run" else "clips"
        sink = wandb.sink(tmp_path / "1", "run1", project=project, more_follow=True)
        if trouble == "stands still":
            os.kill(first, signal.SIGSTOP)
            monkeypatch.setattr(wandb_sink, "STALLED_SECONDS", 1.0)
        elif trouble == "dies in a run":
            os.kill(first, signal.SIGKILL)
        for step in range(10_000):
            sink.write({"train/step": step, "train/loss": 0.1})
        sink.close(SUMMARY, 0)
    monkeypatch.setattr(wandb_sink, "STALLED_SECONDS", 120.0)
    assert [warning in text for text in wandb.warnings if warning] == [True] * bool(warning)
    wait_for(lambda: not is_alive(first))
    assert has_end(wandb.run(tmp_path / "2", "run2", more_follow=True))
    assert wandb.recorder() != first


def test_rows_for_a_process_that_takes_none_do_not_fill_the_memory(wandb, tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_sink, "MOST_VALUES", 200)
    recorder_process.begin()
    pid = wandb.recorder()
    os.kill(pid, signal.SIGSTOP)
    sink = wandb.sink(tmp_path / "run", "slow1")
    for step in range(20_000):
        sink.write({"train/step": step})
    assert ["too slow" in text for text in wandb.warnings] == [True]
    os.kill(pid, signal.SIGCONT)
    sink.close(SUMMARY, 0)
    assert 100 < len(wandb.history(wandb.file(tmp_path / "run", "slow1"))) < 10_000


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("online", "online"),
        ("offline", "offline"),
        pytest.param("online", "fails", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_continues_has_each_row_once(start_server, wandb, tmp_path, first, second):
    """``wandb sync`` sends what is offline; the server keeps rows by the client's offsets."""
    server, folder = start_server(), tmp_path / "run"
    rows: list[Row] = [{"train/step": step, "train/loss": 1 / step} for step in range(1, 13)]
    wandb.run(folder, "again1", rows[:8], mode=first, summary={"steps": 8}, exit_code=1)
    server.fault = 500 if second == "fails" else None
    mode = "offline" if second == "offline" else "online"
    # The checkpoint is of step 5: three steps are taken again.
    more = {"summary": {"steps": 12}, "sent_until": 8, "resumes": True}
    wandb.run(folder, "again1", rows[5:], mode=mode, **more)
    server.fault = None
    assert len(wandb.warnings) == (second == "fails")
    folders = [one for one in (folder / "wandb").glob("*run-*") if one.is_dir()]
    offline = sorted(str(one) for one in folders if one.name.startswith("offline-run-"))
    assert len([one for one in folders if not one.is_symlink()]) == 2  # the first part is kept
    if offline:
        assert first != "offline" or server.requests == []
        python("-m", "wandb", "sync", *offline, cwd=Path(os.environ["HOME"]))
    [run] = server.runs.values()
    assert_same(run.history(), rows)
    own = [run.rows[at]["_step"] for at in sorted(run.rows)]
    assert own == sorted(set(own))
    assert (run.exit_code, run.summary["steps"]) == (0, 12)


EFFECTIVE = (
    "from runner.telemetry.sinks.wandb_sink import effective_mode; print(effective_mode('auto'))"
)
NETRC = {".netrc": f"machine 127.0.0.1:9\n  login user\n  password {KEY}\n"}
SETTINGS = {".config/wandb/settings": "[default]\nmode = offline\n"}


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, {}, "offline"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "dryrun"}, {}, "offline"),
        ({}, NETRC, "online"),
        ({"WANDB_API_KEY": KEY}, SETTINGS, "offline"),
    ],
)
def test_auto_is_what_wandb_itself_would_do(own_home, environ, files, expected):
    for name, text in files.items():
        (own_home / name).parent.mkdir(parents=True, exist_ok=True)
        (own_home / name).write_text(text)
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    done = python("-c", EFFECTIVE, env=env, cwd=own_home)
    assert (done.stdout.strip(), done.stderr) == (expected, "")
