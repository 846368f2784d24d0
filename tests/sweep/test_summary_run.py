"""A sweep that wandb tracks is a run there too, with the figures of the page."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from runner.compose.request import request
from runner.sweep.summary_run import record_sweep
from runner.telemetry.sinks import wandb_sink
from tests.report.examples import NORM, sweep

SMALL = ["-m", "clip=norm", "clip.threshold=0.1,1", "data.batch_size=16", "train.max_duration=6ba"]

# Runs the command where wandb fails once the runs are recorded.
WITHOUT_WANDB = """
import sys
from runner.cli.main import main
from runner.sweep import summary_run
def fail(*args, **more):
    raise ValueError("no wandb today")
summary_run.WandbSink = fail
sys.exit(main(sys.argv[1:]))
"""


def inspected(file):
    """The records that wandb's own reader finds, by their kind."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    read = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    records = {}
    for record in map(json.loads, read.stdout.splitlines()):
        records.setdefault(record["type"], []).append(record.get(record["type"]))
    return records


def numbers(values):
    """All numbers of a curve; a gap is null and no NaN, which is no JSON."""
    return [value for value in values if value is not None]


def test_a_sweep_leaves_a_run_of_wandb_and_a_longer_one_continues_it(command):
    tracked = ["tracker.mode=offline", "tracker.project=clips", "sweep.name=mine"]
    command(*SMALL, *tracked)
    (file,) = command.folder.glob("wandb/offline-run-*/*.wandb")
    records = inspected(file)
    (run,) = records["run"]
    assert (run["job_type"], run["project"]) == ("sweep", "clips")
    assert (run["run_group"], run["display_name"]) == ("mine", "mine")
    figures = {
        path.relative_to(file.parent / "files" / "media" / "plotly").as_posix(): json.loads(
            path.read_text(), parse_constant=pytest.fail
        )
        for path in file.parent.glob("files/media/plotly/**/*.json")
    }
    names = {name.split("_")[0] for name in figures}
    assert {"sweep/loss", "sweep/eval-loss", "sweep/norm-norm", "sweep/histogram"} <= names
    (loss,) = (one for name, one in figures.items() if name.startswith("sweep/loss_"))
    rows = [
        json.loads(row) for row in (command.folder / "0/metrics.jsonl").read_text().splitlines()
    ]
    curves = [trace["y"] for trace in loss["data"]]
    assert any(numbers(y) == pytest.approx([row["train/loss"] for row in rows]) for y in curves)
    summary = {}
    for one in records["summary"]:
        summary |= one["update"]
    losses = {one["overrides"][0]: one["objective"] for one in command.record()["runs"]}
    best = min(losses, key=losses.__getitem__)
    assert summary["best/eval/loss"] == pytest.approx(losses[best])
    assert f"norm {best.partition('=')[2]}" == summary["best/setting"]

    command(*SMALL, "seed=0,1", *tracked)
    ids = {one.stem for one in command.folder.glob("wandb/offline-run-*/*.wandb")}
    assert ids == {file.stem}


@pytest.mark.slow
def test_without_a_tracker_and_with_a_fault_there_is_no_record(command):
    command(*SMALL, "tracker=none", "sweep.name=none")
    assert not list(command.sweeps.glob("none/**/wandb"))
    faulty = ["sweep.name=faulty", "tracker.mode=offline"]
    _, err = command(*SMALL, *faulty, before=("-c", WITHOUT_WANDB))
    assert err.count("wandb records nothing of the sweep") == 1
    assert "no wandb today" in err
    assert not (command.sweeps / "faulty" / "wandb").exists()
    assert json.loads((command.sweeps / "faulty" / "sweep.json").read_text())["state"] == "finished"


def made_sweep(folder, *words):
    """A sweep that has ended, and the configuration of one of its runs."""
    asked = request(["clip=norm", "tracker.mode=online", *words], multirun=False, writes=False)
    return sweep(folder, NORM, steps=40), asked.jobs[0].config


def test_a_server_gets_the_run_with_its_best_setting(start_server, tmp_path, caplog, monkeypatch):
    for limit in ("INIT_SECONDS", "FINISH_SECONDS", "STALLED_SECONDS"):
        monkeypatch.setattr(wandb_sink, limit, 120.0)
    server = start_server()
    folder, config = made_sweep(tmp_path / "s", "tracker.timeout=240")
    record_sweep(folder, config)
    [run] = server.runs.values()
    assert run.created["jobType"] == "sweep"
    assert run.exit_code == 0
    assert run.summary["best/setting"].startswith("norm ")
    drawn = {key for row in run.history() for key in row} | set(run.summary)
    assert {"sweep/loss", "sweep/eval-loss"} <= drawn
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("fault", [500, "hang"])
def test_a_server_that_fails_costs_at_most_the_timeout_and_leaves_a_record(
    fault, start_server, tmp_path, caplog
):
    start_server(fault)
    folder, config = made_sweep(tmp_path / "s", "tracker.timeout=20")
    record_sweep(folder, config)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    assert [run["job_type"] for run in inspected(file)["run"]] == ["sweep"]


def test_figures_that_take_too_long_are_one_warning(tmp_path, caplog):
    words = ["clip=norm", "tracker.mode=offline", "tracker.timeout=0.001"]
    [job] = request(words, multirun=False, writes=False).jobs
    folder = sweep(tmp_path / "s", NORM, steps=400)
    record_sweep(folder, job.config)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tracker.timeout" in caplog.text
    assert not (folder / "wandb").exists()
    for thread in threading.enumerate():
        if thread.name == "figures of the sweep":
            thread.join(120)
