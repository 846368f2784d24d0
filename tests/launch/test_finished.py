"""Whole runs that finish: what they record, alike in one process, ranks, torchrun and restarts."""

import json
import subprocess
import sys

import pytest
import torch
import yaml

from tests.launch.conftest import DDP
from tests.launch.ends import TORCHRUN, faulty, only_run, read, rows_of
from tests.process import environment_at, python

# The runs of conftest serve one worker.
pytestmark = pytest.mark.xdist_group("finished")


def test_the_status_of_a_run_says_that_it_finished(single):
    status = read(single.folder)
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 12)
    assert (status["error"], bool(status["wandb_run_id"])) == (None, True)
    assert list((single.folder / "wandb").glob("offline-run-*/*.wandb"))


def test_each_row_has_the_clipping_of_its_step(single):
    rows = rows_of(single.folder)
    assert [row["train/step"] for row in rows] == list(range(1, 13))
    for row in rows:
        assert row["clip/coef"] == pytest.approx(min(1, 0.25 / row["grad/norm"]), rel=1e-5)
        clipped = row["clip/coef"] * row["grad/norm"]
        assert clipped == pytest.approx(row["grad/norm_clipped"], rel=1e-5)
        assert row["clip/clipped"] == (row["grad/norm"] > 0.25)


def test_the_summary_of_a_run_follows_from_its_rows(single):
    summary = read(single.folder, "summary.json")
    rows = rows_of(single.folder)
    mean = sum(row["clip/clipped"] for row in rows) / 12
    assert summary["clip/ratio_total"] == pytest.approx(mean)
    assert summary["final"]["eval/accuracy"] == rows[-1]["eval/accuracy"]


def test_the_configuration_of_a_run_is_recorded(single):
    config = yaml.safe_load((single.folder / "config.yaml").read_text())
    assert (config["clip"]["mode"], config["data"]["batch_size"]) == ("norm", 32)


def test_the_log_of_a_run_says_what_it_runs_on(single):
    parameters = read(single.folder, "summary.json")["parameters"]
    log = (single.folder / "runner.log").read_text()
    for line in (
        f"torch {torch.__version__.partition('+')[0]}",
        "cpu, 1 rank (plugin=single), 1,437 samples, ",
        "wandb: offline",
        f" {parameters:,} parameters, {single.folder}\n",
        f"finished with exit code 0; results are in {single.folder}\n",
    ):
        assert line in log, log


def test_a_run_prints_where_its_page_is(single):
    assert single.printed.splitlines()[0] == str(single.folder / "report.html")


def test_two_local_ranks_that_started_again_are_one_process(single, ranks):
    assert read(ranks, "summary.json")["world_size"] == 2
    assert not (ranks / "wandb").exists()
    for row, expected in zip(rows_of(ranks), rows_of(single.folder), strict=True):
        for key in ("train/loss", "grad/norm", "clip/coef"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3), key
        assert row["train/samples"] == expected["train/samples"]
    log = (ranks / "runner.log").read_text()
    assert "5" * 40 not in log
    assert "hush-hush" not in log


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    """The folder of a run whose two ranks torchrun started, and what they printed."""
    environment = environment_at(tmp_path_factory.mktemp("torchrun"))
    done = python(*TORCHRUN, *DDP, *faulty("warn", 3), env=environment)
    return only_run(environment["RUNNER_OUTPUTS"]), done.stdout + done.stderr


def test_ranks_of_torchrun_are_local_ranks(torchrun, ranks):
    folder, _ = torchrun
    assert rows_of(folder) == rows_of(ranks)


def test_all_ranks_write_one_log(torchrun):
    folder, _ = torchrun
    log = (folder / "runner.log").read_text()
    assert "planted warning of rank 0" in log
    assert "] - rank 1: planted warning of rank 1" in log
    assert "planted Python warning" in log


def test_the_first_rank_alone_prints(torchrun):
    _, printed = torchrun
    assert "planted warning of rank 0" in printed
    assert "of rank 1" not in printed


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """The folder of a run that diverges, saves nothing, and whose streams are closed."""
    environment = environment_at(tmp_path_factory.mktemp("silent"))
    words = "tracker=none device=cpu train.max_duration=3ba checkpoint=none optimizer.lr=1e18"
    command = f"{sys.executable} -m runner {words} clip=none scheduler=constant >&- 2>&-"
    subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=600)
    return only_run(environment["RUNNER_OUTPUTS"])


def test_a_run_whose_streams_are_closed_finishes(silent):
    """Nothing of that is logged."""
    assert read(silent)["state"] == "finished"
    assert "Traceback" not in (silent / "runner.log").read_text()


def test_a_run_may_save_no_checkpoint(silent):
    assert not (silent / "checkpoints").exists()


def test_rows_of_a_run_that_diverges_are_strict_json(silent):
    lines = (silent / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert rows[-1]["grad/nonfinite"] > 0
    assert any(isinstance(row["grad/norm"], str) for row in rows)
