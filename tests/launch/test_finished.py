"""Whole runs that finish: what they record, alike in one process, ranks, torchrun and restarts."""

import json
import subprocess
import sys

import pytest
import torch
import yaml

from tests.launch.conftest import DDP
from tests.launch.ends import TORCHRUN, faulty, only_run, read, rows_of
from tests.process import python

# The runs of conftest serve one worker.
pytestmark = pytest.mark.xdist_group("finished")


def test_the_record_of_a_run(single):
    folder = single.folder
    status, summary, rows = read(folder), read(folder, "summary.json"), rows_of(folder)
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 12)
    assert (status["error"], bool(status["wandb_run_id"])) == (None, True)
    assert [row["train/step"] for row in rows] == list(range(1, 13))
    for row in rows:
        assert row["clip/coef"] == pytest.approx(min(1, 0.25 / row["grad/norm"]), rel=1e-5)
        clipped = row["clip/coef"] * row["grad/norm"]
        assert clipped == pytest.approx(row["grad/norm_clipped"], rel=1e-5)
        assert row["clip/clipped"] == (row["grad/norm"] > 0.25)
    mean = sum(row["clip/clipped"] for row in rows) / 12
    assert summary["clip/ratio_total"] == pytest.approx(mean)
    assert summary["final"]["eval/accuracy"] == rows[-1]["eval/accuracy"]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["clip"]["mode"], config["data"]["batch_size"]) == ("norm", 32)
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))
    log = (folder / "runner.log").read_text()
    for wanted in (
        f"torch {torch.__version__.partition('+')[0]}",
        "cpu, 1 rank (plugin=single), 1,437 samples, ",
        "wandb: offline",
        f" {summary['parameters']:,} parameters, {folder}\n",
        f"finished with exit code 0; results are in {folder}\n",
    ):
        assert wanted in log, log
    assert single.printed.splitlines()[0] == str(folder / "report.html")


def test_two_local_ranks_that_started_again_are_one_process(single, ranks):
    assert read(ranks, "summary.json")["world_size"] == 2
    assert not (ranks / "wandb").exists()
    for row, wanted in zip(rows_of(ranks), rows_of(single.folder), strict=True):
        for key in ("train/loss", "grad/norm", "clip/coef"):
            assert row[key] == pytest.approx(wanted[key], rel=1e-3), key
        assert row["train/samples"] == wanted["train/samples"]
    log = (ranks / "runner.log").read_text()
    assert "5" * 40 not in log
    assert "hush-hush" not in log


def test_ranks_of_torchrun_are_local_ranks_and_write_one_log(environment, ranks):
    done = python(*TORCHRUN, *DDP, *faulty("warn", 3), env=environment)
    folder = only_run(environment["RUNNER_OUTPUTS"])
    assert rows_of(folder) == rows_of(ranks)
    log, printed = (folder / "runner.log").read_text(), done.stdout + done.stderr
    assert "planted warning of rank 0" in log
    assert "] - rank 1: planted warning of rank 1" in log
    assert "planted Python warning" in log
    assert "planted warning of rank 0" in printed
    assert "of rank 1" not in printed


def test_a_run_may_save_and_print_nothing(environment):
    """Its streams are closed, and nothing of that is logged."""
    words = "tracker=none device=cpu train.max_duration=3ba checkpoint=none optimizer.lr=1e18"
    command = f"{sys.executable} -m runner {words} clip=none scheduler=constant >&- 2>&-"
    subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=600)
    folder = only_run(environment["RUNNER_OUTPUTS"])
    assert read(folder)["state"] == "finished"
    assert not (folder / "checkpoints").exists()
    assert "Traceback" not in (folder / "runner.log").read_text()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert rows[-1]["grad/nonfinite"] > 0
    assert any(isinstance(row["grad/norm"], str) for row in rows)
