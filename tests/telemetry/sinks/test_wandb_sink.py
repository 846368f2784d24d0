"""wandb gets every row, offline or online, and no server can hold a run up.

The record is read back by wandb's own command line, which shares no code with ours.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.run_folder.rows import JsonlSink, Row, read_rows
from runner.run_folder.strict_json import decode
from runner.telemetry.sinks import wandb_process, wandb_record, wandb_sink
from runner.telemetry.sinks.wandb_sink import WandbSink, new_run_id
from tests.process import wait_for

ROOT = Path(__file__).parents[3]
CONFIG: dict[str, Any] = {
    "seed": 3,
    "clip": {"mode": "norm", "threshold": 0.25, "exclude": ["head.*"]},
    "model": {"_target_": "torch.nn.Linear", "bias": None},
}
SUMMARY: dict[str, Any] = {
    "final": {"eval/loss": 0.125, "train/loss": math.nan},
    "grad/norm": {"p50": 1 / 3, "max": math.inf},
    "clip/ratio_total": 0.5,
    "steps": 6,
}
ROWS: list[Row] = [
    {"train/step": 1, "train/loss": 2.0, "grad/norm": 1 / 3, "clip/clipped": 1},
    {"train/step": 2, "train/loss": 1e-9, "grad/norm": 12345678.901234567, "clip/clipped": 1},
    {"train/step": 3, "train/loss": math.nan, "grad/norm": math.inf, "clip/clipped": 0},
    {"train/step": 4, "train/loss": -math.inf, "grad/norm/head.weight": 0.1, "clip/clipped": 0},
    {"train/step": 5, "train/loss": 0.1, "eval/loss": 0.3, "eval/accuracy": 0.975},
    {"train/step": 6, "train/loss": 0.3},
]


def _sink(folder: Path, mode: str = "auto", run_id: str | None = None, **more: Any) -> WandbSink:
    folder.mkdir(exist_ok=True)
    given: dict[str, Any] = {
        "timeout": 120.0,
        "project": "clips",
        "group": "sweep",
        "tags": ["a", "b"],
        "job_type": "train",
        "name": "clip=norm clip.threshold=0.25",
        "config": CONFIG,
    }
    return WandbSink(folder, mode=mode, run_id=run_id or new_run_id(), **{**given, **more})


def _record(folder: Path, run_id: str) -> list[dict[str, Any]]:
    """What wandb's own reader finds in the only record of that run."""
    (file,) = folder.glob(f"wandb/*run-*/run-{run_id}.wandb")
    read = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return [json.loads(line) for line in read.stdout.splitlines()]


def _one(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [record[kind] for record in records if record["type"] == kind]
    one: dict[str, Any] = found
    return one


def _history(records: list[dict[str, Any]]) -> list[Row]:
    """Rows with wandb's own `_` keys left out."""
    rows = []
    for record in records:
        if record["type"] == "history":
            item = decode(json.dumps(record["history"]["item"]))
            rows.append({key: value for key, value in item.items() if not key.startswith("_")})
    return rows


def _assert_same(got: list[Row], expected: list[Row]) -> None:
    assert [set(row) for row in got] == [set(row) for row in expected]
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6, nan_ok=True)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("exit_code", [0, 1])
def test_the_offline_record_holds_what_metrics_jsonl_holds(
    own_home: Path, tmp_path: Path, exit_code: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    sink = _sink(folder, run_id="offline1")
    file = JsonlSink(folder / "metrics.jsonl")
    for row in ROWS:
        sink.write(row)
        file.write(row)
    sink.close(SUMMARY if exit_code == 0 else None, exit_code)
    file.close(None, exit_code)
    sink.close(SUMMARY, 7)

    records = _record(folder, "offline1")
    _assert_same(_history(records), list(read_rows(folder / "metrics.jsonl")))
    run = _one(records, "run")
    config = run["config"]["update"]
    config.pop("_wandb", None)
    assert config == CONFIG
    assert (run["run_id"], run["project"], run["run_group"]) == ("offline1", "clips", "sweep")
    assert (run["job_type"], run["tags"]) == ("train", ["a", "b"])
    assert run["display_name"] == "clip=norm clip.threshold=0.25"
    assert _one(records, "exit").get("exit_code", 0) == exit_code
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    assert {"glob_name": "*", "step_metric": "train/step"}.items() <= {
        key: value for metric in metrics for key, value in metric.items()
    }.items()
    if exit_code == 0:
        updates = [r["summary"]["update"] for r in records if r["type"] == "summary"]
        last = {key: value for update in updates for key, value in update.items()}
        assert last["grad/norm/p50"] == pytest.approx(1 / 3)
        assert (last["train/loss"], last["grad/norm/max"]) == ("NaN", "Infinity")
        assert (last["eval/loss"], last["steps"]) == (0.125, 6)
        assert not [key for key in last if key.startswith("final/")]
    assert {path.name for path in folder.iterdir()} == {"wandb", "metrics.jsonl"}
    assert _warnings(caplog) == []


@pytest.mark.parametrize(
    ("files", "there"),
    [((), False), (("nvidiactl",), False), (("nvidiactl", "nvidia0"), True), (("kfd",), True)],
)
def test_the_machine_is_watched_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], there: bool
) -> None:
    wandb = pytest.importorskip("wandb")
    for name in files:
        (tmp_path / name).touch()
    assert wandb_process.has_gpu(tmp_path) is there
    monkeypatch.setattr(wandb_process, "has_gpu", lambda: there)
    settings = wandb_process._settings(wandb, 1.0, 1.0)
    assert settings.x_disable_stats is not there
    assert settings.x_stats_pid == os.getppid()


def test_offline_asks_no_server(start_server: Any, tmp_path: Path) -> None:
    server = start_server()
    sink = _sink(tmp_path / "run", mode="offline", run_id="quiet1")
    sink.write(ROWS[0])
    sink.close(SUMMARY, 0)
    assert server.requests == []
    assert len(_history(_record(tmp_path / "run", "quiet1"))) == 1


def test_online_delivers_every_row(
    start_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server()
    sink = _sink(tmp_path / "run", run_id="online1")
    more: list[Row] = [{"train/step": step, "grad/norm": 1 / step} for step in range(7, 1000)]
    for row in ROWS + more:
        sink.write(row)
    sink.close(SUMMARY, 3)
    run = server.runs["online1"]
    _assert_same(run.history(), ROWS + more)
    assert run.config == CONFIG
    assert run.exit_code == 3
    assert run.summary["grad/norm/p50"] == pytest.approx(1 / 3)
    assert run.created["groupName"] == "sweep"
    assert run.created["tags"] == ["a", "b"]
    assert _warnings(caplog) == []


def test_two_runs_in_one_process_are_two_runs_even_at_once(
    start_server: Any, tmp_path: Path
) -> None:
    server = start_server()
    first = _sink(tmp_path / "1", run_id="first", config={"seed": 1})
    second = _sink(tmp_path / "2", run_id="second", config={"seed": 2})
    first.write({"train/step": 1, "train/loss": 1.0})
    second.write({"train/step": 1, "train/loss": 2.0})
    first.close(None, 0)
    second.close(None, 1)
    third = _sink(tmp_path / "1", run_id="third", config={"seed": 3})
    third.write({"train/step": 1, "train/loss": 3.0})
    third.close(None, 0)
    told = {
        run.id: (run.config["seed"], run.history()[0]["train/loss"], run.exit_code)
        for run in server.runs.values()
    }
    assert told == {"first": (1, 1, 0), "second": (2, 2, 1), "third": (3, 3, 0)}


@pytest.mark.parametrize("fault", [401, 403, 500, "hang", "refused"])
@pytest.mark.product(every=3)
def test_a_server_that_does_not_take_the_run_leaves_an_offline_record(
    fault: int | str,
    start_server: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wandb_sink, "INIT_SECONDS", 1.5)
    server = start_server(None if fault == "refused" else fault)
    if fault == "refused":
        server.close()
    sink = _sink(tmp_path / "run", run_id="refused1")
    for row in ROWS:
        sink.write(row)
    sink.close(SUMMARY, 0)

    assert len(_warnings(caplog)) == 1
    assert "recorded offline" in _warnings(caplog)[0]
    (only,) = [path for path in (tmp_path / "run/wandb").glob("*run-*") if not path.is_symlink()]
    assert only.name.startswith("offline-run-")
    records = _record(tmp_path / "run", "refused1")
    _assert_same(_history(records), ROWS)
    assert _one(records, "exit").get("exit_code", 0) == 0


@pytest.mark.parametrize(
    ("fault", "more"),
    [
        ("hang", {"answered": 1}),
        ("hang", {"only": "file_stream"}),
        (500, {"only": "file_stream"}),
        (404, {"only": "file_stream"}),
    ],
)
@pytest.mark.product(every=2)
def test_a_server_that_fails_later_holds_nothing_up(
    fault: int | str,
    more: dict[str, Any],
    start_server: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("INIT_SECONDS", "FINISH_SECONDS")[not more.get("answered") :]:
        monkeypatch.setattr(wandb_sink, limit, 1.5)
    start_server(fault, **more)
    sink = _sink(tmp_path / "run", run_id="later1")
    for row in ROWS:
        sink.write(row)
    sink.close(SUMMARY, 1)
    assert len(_warnings(caplog)) == 1
    assert "wandb sync" in _warnings(caplog)[0]
    records = _record(tmp_path / "run", "later1")
    _assert_same(_history(records), ROWS)
    assert _one(records, "exit")["exit_code"] == 1


@pytest.mark.parametrize("how", ["hangs", "is gone"])
@pytest.mark.product(every=2)
def test_a_server_that_fails_under_a_flood_of_rows_holds_nothing_up(
    how: str,
    start_server: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind some ten megabytes for a server that hangs, wandb forgets its own time limits."""
    monkeypatch.setattr(wandb_sink, "FINISH_SECONDS", 1.0)
    server = start_server()
    sink = _sink(tmp_path / "run", run_id="flood1")
    sink.write({"train/step": 0})
    wait_for(lambda: server.runs)
    server.fault = "hang"
    if how == "is gone":
        server.close()
    layers = {f"grad/norm/blocks.{i}.weight": 1 / (i + 3) for i in range(1000)}
    for step in range(1, 499):
        sink.write({"train/step": step, **layers})
    # The file is written in blocks, of which this row fills some.
    sink.write({"train/step": 499, **{f"last/{i}": 1 / (i + 3) for i in range(3000)}})
    (record,) = (tmp_path / "run").glob("wandb/run-*/run-*.wandb")
    wait_for(lambda: b"last/" in record.read_bytes())
    sink.close(None, 0)
    assert len(_warnings(caplog)) == 1
    records = _record(tmp_path / "run", "flood1")
    assert [row["train/step"] for row in _history(records)] == list(range(500))
    assert _one(records, "exit").get("exit_code", 0) == 0


def test_online_without_a_key_is_recorded_offline_and_prompts_for_nothing(
    own_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = _sink(tmp_path / "run", mode="online", run_id="nokey1")
    sink.write(ROWS[0])
    sink.close(None, 0)
    assert len(_warnings(caplog)) == 1
    assert "API key" in _warnings(caplog)[0]
    assert len(_history(_record(tmp_path / "run", "nokey1"))) == 1


def test_disabled_records_nothing(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for mode in ("disabled", "auto"):
        sink = _sink(tmp_path / "run", mode=mode)
        sink.write(ROWS[0])
        sink.close(SUMMARY, 0)
    assert list((tmp_path / "run").iterdir()) == []


PROGRAM = """
import os, signal, sys
from pathlib import Path
from runner.telemetry.sinks import wandb_sink
from runner.telemetry.sinks.wandb_sink import WandbSink
folder = Path(sys.argv[1])
wandb_sink.INIT_SECONDS = wandb_sink.FINISH_SECONDS = 120
sink = WandbSink(folder, mode="auto", timeout=120, project="p", group=None, tags=[],
                 job_type="train", name="n", run_id="killed1", config={"seed": 0})
for step in range(1, 4):
    sink.write({"train/step": step})
if os.fork() == 0:  # a loader's worker that holds the pipe open until the test closes its input
    os.read(0, 1)
    os._exit(0)
if "killed" in sys.argv:
    sink._outbox.put(None)
    sink._sender.join()  # all rows are in the pipe
    os.kill(os.getpid(), signal.SIGKILL)
sink.close(None, 0)
"""


@contextmanager
def _program(folder: Path, *words: str) -> Iterator[int]:
    """Run the program to its end; the worker that it leaves lives until the block ends."""
    folder.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(folder), *words]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        yield process.wait(120)


def test_a_run_whose_process_is_killed_is_marked_as_failed(own_home: Path, tmp_path: Path) -> None:
    with _program(tmp_path / "run", "killed") as code:
        assert code == -signal.SIGKILL
        files = "run/wandb/*run-*/run-killed1.wandb"
        wait_for(lambda: any(map(wandb_record.has_end, tmp_path.glob(files))))
    records = _record(tmp_path / "run", "killed1")
    assert [row["train/step"] for row in _history(records)] == [1, 2, 3]
    assert _one(records, "exit")["exit_code"] == 1


def test_no_secret_and_no_argument_is_recorded(
    start_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    monkeypatch.setenv("PLANTED_TOKEN", "planted-in-the-environment")
    with _program(tmp_path / "run", "planted-as-an-argument") as code:
        assert code == 0
    assert server.runs["killed1"].exit_code == 0
    monkeypatch.setenv("WANDB_MODE", "offline")
    with _program(tmp_path / "off", "planted-as-an-argument") as code:
        assert code == 0
    files = [path for place in ("run", "off") for path in (tmp_path / place).rglob("*")]
    written = [path.read_bytes() for path in files if path.is_file()]
    assert len(written) > 4
    for text in [*written, *server.bodies]:
        assert b"planted" not in text
        assert os.environ["WANDB_API_KEY"].encode() not in text


def test_a_process_of_wandb_that_breaks_off_is_one_warning(
    own_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = _sink(tmp_path / "run")
    assert sink._process is not None
    sink._process.kill()
    sink._process.wait()
    for row in ROWS:
        sink.write(row)
    sink.close(SUMMARY, 0)
    assert len(_warnings(caplog)) == 1


def test_a_process_of_wandb_that_stands_still_is_given_up(
    own_home: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wandb_sink, "STALLED_SECONDS", 1.0)
    sink = _sink(tmp_path / "run")
    assert sink._process is not None
    sink._process.send_signal(signal.SIGSTOP)
    for step in range(10_000):
        sink.write({"train/step": step, "train/loss": 0.1})
    sink.close(SUMMARY, 0)
    assert len(_warnings(caplog)) == 1


def test_rows_for_a_process_that_takes_none_do_not_fill_the_memory(
    own_home: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wandb_sink, "MOST_VALUES", 10_000)
    monkeypatch.setattr(wandb_sink, "STALLED_SECONDS", 1.0)
    sink = _sink(tmp_path / "run", timeout=0.1)
    assert sink._process is not None
    sink._process.send_signal(signal.SIGSTOP)
    for step in range(100_000):
        sink.write({"train/step": step, "train/loss": 0.1})
    assert sink._outbox.qsize() < 10_000
    assert ["too slow" in text for text in _warnings(caplog)] == [True]
    sink.close(SUMMARY, 0)


def test_a_config_that_wandb_cannot_take_is_one_warning(
    own_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = _sink(tmp_path / "run", project="a/b:c")
    sink.write(ROWS[0])
    sink.close(SUMMARY, 0)
    assert len(_warnings(caplog)) == 1
    assert "no more of this run" in _warnings(caplog)[0]
