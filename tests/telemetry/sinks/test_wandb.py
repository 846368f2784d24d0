"""wandb gets every row, offline or online, and no server can hold a run up."""

import json
import logging
import math
import os
import time
from pathlib import Path

import pytest
import wandb

from runner.launch.supervise import name_of
from runner.run_folder.strict_json import JsonlSink, Row, decode, read_rows
from runner.telemetry.sinks import wandb_sink
from runner.telemetry.sinks.wandb_sink import WandbSink
from tests.process import ROOT, inspected, python

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


@pytest.mark.parametrize(
    ("words", "swept", "name"),
    [
        ("clip=norm tracker.group=g sweep.name=s log.flush=1", None, "clip=norm"),
        ("tracker=none resume=never", None, "folder"),
        (
            "clip=norm clip.threshold=0.1 +model.a=1 seed=3",
            ["seed", "+model.a"],
            "+model.a=1 seed=3",
        ),
        ("clip=norm seed=0 clip.skip=0.1234567890123456", ["clip.skip"], "clip.skip=0.123457"),
        (f"model.a={'x' * 70}", None, f"model.a={'x' * 51}…"),
    ],
)
def test_the_name_of_a_run_is_what_sets_it_apart(words, swept, name):
    assert name_of(words.split(), swept, Path("folder")) == name
    assert len(name) <= 60


def record(folder, run_id, rows=ROWS, summary=SUMMARY, exit_code=0, **more):
    """Record a whole run; return its file."""
    folder.mkdir(exist_ok=True)
    about = {"project": "clips", "group": "sweep", "tags": ["a", "b"], "job_type": "train"}
    options = about | {"mode": "auto", "timeout": 120.0, "name": "clip=norm", "config": CONFIG}
    sink = WandbSink(folder, run_id=run_id, **options | more)
    for row in rows:
        sink.write(row)
    sink.close(summary, exit_code)
    return file_of(folder, run_id)


def file_of(folder, run_id):
    return sorted(folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb"))[-1]


def history(file):
    """Return the rows, without wandb's own keys."""
    items = [decode(json.dumps(entry["item"])) for entry in inspected(file)["history"]]
    return [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]


@pytest.fixture
def warnings(own_home, caplog, monkeypatch):
    """The warnings of sinks whose servers may take their time, on a busy machine too."""
    monkeypatch.setattr(wandb_sink, "SERVER_SECONDS", 120.0)
    ours = lambda r: r.name.startswith("runner") and r.levelno >= logging.WARNING  # noqa: E731
    return lambda: [r.getMessage() for r in caplog.records if ours(r)]


def assert_same(got, expected):
    assert [set(row) for row in got] == [set(row) for row in expected]
    for row, wanted_row in zip(got, expected, strict=True):
        assert row == pytest.approx(wanted_row, rel=1e-6, nan_ok=True)


KEY = "local-" + "a" * 40


def test_an_offline_run_is_recorded_whole(warnings, tmp_path):
    with JsonlSink(tmp_path / "rows.jsonl") as rows:
        for row in ROWS:
            rows.write(row)
    file = record(tmp_path / "0", "ended")
    assert warnings() == []
    assert {path.name for path in (tmp_path / "0").iterdir()} == {"wandb"}

    assert_same(history(file), list(read_rows(tmp_path / "rows.jsonl")))
    records = inspected(file)
    [run] = records["run"]
    assert {k: v for k, v in run["config"]["update"].items() if k != "_wandb"} == CONFIG
    assert (run["run_id"], run["project"], run["run_group"]) == ("ended", "clips", "sweep")
    assert (run["job_type"], run["tags"], run["display_name"]) == ("train", ["a", "b"], "clip=norm")
    metrics = {key: value for metric in records["metric"] for key, value in metric.items()}
    assert (metrics["glob_name"], metrics["step_metric"]) == ("*", "train/step")
    last = {k: v for part in records["summary"] for k, v in part["update"].items()}
    assert last["grad/norm/p50"] == pytest.approx(1 / 3)
    expected = {"train/loss": "NaN", "grad/norm/max": "Infinity", "eval/loss": 0.125, "steps": 6}
    assert last.items() >= expected.items()
    assert not [key for key in last if key.startswith("final/")]
    assert [ending.get("exit_code", 0) for ending in records["exit"]] == [0]


def test_an_offline_run_that_fails_keeps_thousands_of_metrics(warnings, tmp_path):
    rows = [{"train/step": n, **{f"grad/norm/{k}": k / 7 for k in range(2000)}} for n in range(4)]
    file = record(tmp_path, "failed", rows, summary=None, exit_code=1)
    assert warnings() == []
    assert [ending.get("exit_code", 0) for ending in inspected(file)["exit"]] == [1]
    assert_same(history(file), rows)


@pytest.mark.parametrize(
    ("fault", "more", "reported"),
    [
        *((fault, {}, "recorded offline") for fault in (401, "hang", "refused", "no key")),
        ("hang", {"only": "file_stream"}, "whole run"),
    ],
)
def test_a_server_that_fails_holds_nothing_up(
    fault, more, reported, start_server, warnings, tmp_path, monkeypatch
):
    monkeypatch.setattr(wandb_sink, "SERVER_SECONDS", 1.5)
    server = start_server(fault if fault in (401, "hang") else None, **more)
    if fault == "refused":
        server.close()
    elif fault == "no key":
        monkeypatch.delenv("WANDB_API_KEY")
    file = record(tmp_path / "run", "failing1", mode="online", exit_code=1)
    [warning] = warnings()
    assert reported in warning
    assert "wandb sync" in warning
    [begun] = [path.name for path in file.parents[1].glob("*run-*") if not path.is_symlink()]
    assert begun.startswith("offline-run-") or "offline" not in reported
    assert_same(history(file), ROWS)
    assert [ending["exit_code"] for ending in inspected(file)["exit"]] == [1]


PROGRAM = """
import sys, time
from pathlib import Path
from runner.telemetry.sinks import wandb_sink
wandb_sink.SERVER_SECONDS, timeout, count = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
layers = {f"grad/norm/blocks.{i}.weight": 1 / (i + 3) for i in range(1000)}
for number in range(2):
    folder = Path.cwd() / str(number)
    folder.mkdir()
    sink = wandb_sink.WandbSink(
        folder, mode="auto", timeout=timeout, project="p", group=None, tags=[], job_type="train",
        name="n", run_id=f"program{number}", config={"seed": 0})
    for step in range(1, count + 1):
        sink.write({"train/step": step, **(layers if count > 2 else {})})
    if count > 2:
        while sum(one.stat().st_size for one in folder.glob("wandb/run-*/*.wandb")) < 5_000_000:
            time.sleep(0.01)
    before = time.monotonic()
    sink.close(None, 0)
    print(time.monotonic() - before, flush=True)
    count = 2
"""


def program(folder, seconds, timeout, rows):
    """Record two runs in a process of their own; return how long the end of each was waited for."""
    words = ["-c", PROGRAM, str(seconds), str(timeout), str(rows), "planted-as-an-argument"]
    done = python(*words, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=folder)
    return list(map(float, done.stdout.split())), done.stderr


def test_a_flood_of_rows_holds_nothing_up(start_server, warnings, tmp_path):
    """Behind some ten megabytes for a server that hangs, wandb forgets its own time limits."""
    start_server("hang", only="file_stream")
    begun = time.monotonic()
    waited, stderr = program(tmp_path, 120.0, 5.0, 500)
    assert 4.9 < waited[0] < 120
    assert time.monotonic() - begun < 120  # nothing waits for the client when the program exits
    assert stderr.count("tracker.timeout") == 2
    assert stderr.count("To send it later") == 2
    steps = [row["train/step"] for row in history(file_of(tmp_path / "1", "program1"))]
    assert steps == [1, 2]  # the next run has a client of its own


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_no_secret_of_the_process_is_recorded(start_server, warnings, tmp_path, monkeypatch, mode):
    server = start_server()
    monkeypatch.setenv("PLANTED_TOKEN", "planted-in-the-environment")
    monkeypatch.setenv("WANDB_MODE", mode)
    program(tmp_path, 120.0, 120.0, 2)
    assert [run.exit_code for run in server.runs.values()] == [0, 0] * (mode == "online")
    assert bool(server.requests) == (mode == "online")
    written = [p.read_bytes() for p in tmp_path.glob("[01]/**/*") if p.is_file()]
    assert len(written) > 1
    for text in [*written, *server.bodies]:
        assert b"planted" not in text
        assert os.environ["WANDB_API_KEY"].encode() not in text


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_run_that_was_killed_several_times_has_each_row_once(
    start_server, warnings, tmp_path, mode
):
    """``wandb sync`` sends what is offline; the server keeps rows by the client's offsets."""
    server = start_server()
    folder = tmp_path / "run"
    rows: list[Row] = [{"train/step": step, "train/loss": 1 / step} for step in range(1, 13)]

    def part(recorded, checkpoint=None, **more):
        """Continue after the checkpoint, whose rows the run keeps; wandb gets the next ones."""
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        with JsonlSink(folder / "metrics.jsonl") as kept:
            for row in rows[: checkpoint or 0]:
                kept.write(row)
        options = {"mode": mode, "summary": None, "exit_code": 1, "continued_after": checkpoint}
        file = record(folder, "again1", recorded, **{**options, **more})
        wandb.teardown()  # its client, which writes the file, ends with its process
        # wandb names folders by the second, and sends them in the order of their names.
        kind = file.parent.name.partition("run-")[0]
        number = len([*folder.glob("wandb/*-part")])
        return file.parent.rename(file.parent.with_name(f"{kind}run-{number}-part")) / file.name

    file = part(rows[:3])  # killed at row 8: wandb had written three of them
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])  # in the middle of a record
    part(rows[5:9], 5)
    file.write_bytes(whole)  # wandb sends nothing after a file that is not whole
    part(rows[7:8], 7)  # it had no row that is new
    part(rows[7:], 7, summary={"steps": 12}, exit_code=0)
    assert warnings() == []
    parts = sorted(map(str, folder.glob("wandb/*-part")))
    assert len(parts) == 4  # earlier parts are kept
    if mode == "offline":
        assert server.requests == []
        python("-m", "wandb", "sync", *parts, cwd=Path(os.environ["HOME"]))
    [run] = server.runs.values()
    assert_same(run.history(), rows)
    config = json.loads(run.created["config"]).items()
    assert {key: item["value"] for key, item in config if key != "_wandb"} == CONFIG
    assert (run.created["groupName"], run.created["tags"]) == ("sweep", ["a", "b"])
    numbers = [run.rows[offset]["_step"] for offset in sorted(run.rows)]
    assert numbers == sorted(set(numbers))
    assert (run.exit_code, run.summary["steps"]) == (0, 12)


def test_a_training_whose_server_never_answers_ends_with_all_its_rows(
    start_server, warnings, outputs, tmp_path
):
    start_server("hang")
    begun = time.monotonic()
    words = ["device=cpu", "train.max_duration=5ba", "tracker.timeout=2", "tracker.mode=online"]
    done = python("-m", "runner", *words, env=dict(os.environ), cwd=ROOT)
    assert time.monotonic() - begun < 120
    folder = Path(done.stdout.splitlines()[-1]).parent
    assert [row["train/step"] for row in read_rows(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


EFFECTIVE = (
    "from runner.telemetry.sinks.wandb_sink import effective_mode; print(effective_mode('auto'))"
)
NETRC = {".netrc": f"machine 127.0.0.1:9\n  login user\n  password {KEY}\n"}
SETTINGS = {".config/wandb/settings": "[default]\nmode = offline\n"}


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
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
