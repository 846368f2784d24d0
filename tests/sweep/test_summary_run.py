"""The run of a sweep in wandb, on a server, with figures that take too long, and without wandb."""

import threading

import pytest

from runner.compose.request import request
from runner.sweep.summary_run import record_sweep
from runner.telemetry.sinks import wandb_sink
from tests.report.examples import NORM, sweep


def recorded(folder, *words):
    """Record a sweep that has ended."""
    asked = request(["clip=norm", *words], multirun=False, writes=False)
    folder = sweep(folder, NORM, steps=40)
    record_sweep(folder, asked.jobs[0].config)
    return folder


@pytest.mark.xdist_group("wandb")
def test_a_server_gets_the_run_with_its_best_setting(start_server, tmp_path, caplog, monkeypatch):
    for limit in ("INIT_SECONDS", "FINISH_SECONDS", "STALLED_SECONDS"):
        monkeypatch.setattr(wandb_sink, limit, 120.0)
    server = start_server()
    recorded(tmp_path / "s", "tracker.mode=online", "tracker.timeout=240")
    [run] = server.runs.values()
    assert run.created["jobType"] == "sweep"
    assert run.exit_code == 0
    assert run.summary["best/setting"].startswith("norm ")
    drawn = {key for row in run.history() for key in row} | set(run.summary)
    assert {"sweep/loss", "sweep/eval-loss"} <= drawn
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.xdist_group("wandb")
@pytest.mark.parametrize("fault", [500, "hang"])
def test_a_server_that_fails_leaves_a_record(fault, start_server, tmp_path, caplog):
    start_server(fault)
    folder = recorded(tmp_path / "s", "tracker.mode=online", "tracker.timeout=20")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len([*folder.glob("wandb/offline-run-*/*.wandb")]) == 1


def test_figures_that_take_too_long_are_one_warning(tmp_path, caplog):
    folder = recorded(tmp_path / "s", "tracker.mode=offline", "tracker.timeout=0.001")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tracker.timeout" in caplog.text
    assert not (folder / "wandb").exists()
    for thread in threading.enumerate():
        if thread.name == "figures of the sweep":
            thread.join(120)
