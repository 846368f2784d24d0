"""Whole runs as a user starts them: their record, their failures, their end by a signal."""

import json
import math
import os
import signal
import subprocess
import sys
from collections import deque
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import yaml

from runner.compose.request import request
from runner.launch import local_rank, supervise
from tests.launch.ends import started
from tests.process import python, wait_for

SMALL = ["train.max_duration=12ba", "eval.interval=12ba", "data.batch_size=16"]


def run(environment, *words, code=0, before=("-m", "runner")):
    """The folder of a run, or its output where it has none."""
    done = python(*before, "device=cpu", *words, code=code, env=environment)
    return only_run(environment), done.stdout + done.stderr


def only_run(environment):
    (folder,) = (Path(environment["RUNNER_OUTPUTS"]) / "runs").iterdir()
    return folder


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read(folder, name):
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize(
    "clip", [["clip=norm", "clip.threshold=0.25"], ["clip=none"], ["clip=value"], ["clip=adaptive"]]
)
@pytest.mark.product(every=2)
def test_the_record_of_a_run(environment, clip):
    folder, _ = run(environment, *clip, *SMALL)
    status, summary = read(folder, "status.json"), read(folder, "summary.json")
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 12)
    assert status["error"] is None
    assert status["wandb_run_id"]
    rows = rows_of(folder)
    assert [row["train/step"] for row in rows] == list(range(1, 13))
    for row in rows:
        product = row["clip/coef"] * row["grad/norm"]
        assert product == pytest.approx(row["grad/norm_clipped"], rel=1e-5)
        if clip[0] == "clip=norm":
            assert row["clip/coef"] == pytest.approx(min(1, 0.25 / row["grad/norm"]), rel=1e-5)
            assert row["clip/clipped"] == (row["grad/norm"] > 0.25)
        if clip[0] == "clip=none":
            assert row["clip/coef"] == 1
    mean = sum(row["clip/clipped"] for row in rows) / 12
    assert summary["clip/ratio_total"] == pytest.approx(mean)
    assert summary["final"]["eval/accuracy"] == rows[-1]["eval/accuracy"]
    assert f"torch {torch.__version__.partition('+')[0]}" in summary["versions"]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["clip"]["mode"] == clip[0].partition("=")[2]
    assert config["data"]["batch_size"] == 16
    assert (folder / ".hydra" / "overrides.yaml").is_file()
    told = (folder / "runner.log").read_text()
    for wanted in (
        f"clip={clip[0].partition('=')[2]}",
        f"torch {torch.__version__.partition('+')[0]}",
        "layout: plugin=single on 1 rank\n",
        "device: cpu (device=cpu; ",
        "wandb: offline (tracker.mode=auto)",
        f"parameters: {summary['parameters']:,}\n",
        "first row: train/step 1 ",
        "last row: train/step 12 ",
        f"finished with exit code 0; results are in {folder}\n",
    ):
        assert wanted in told, told
    assert list((folder / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
@pytest.mark.product(every=2)
def test_two_local_ranks_are_one_process(environment, tmp_path, plugin):
    one, _ = run(environment, *SMALL, "data.batch_size=32")
    ranks = environment | {"RUNNER_OUTPUTS": str(tmp_path / "ranks")}
    two, _ = run(
        ranks, *SMALL, f"plugin={plugin}", "plugin.nproc=2", "accumulation=x2", "data.batch_size=8"
    )
    assert read(two, "summary.json")["world_size"] == 2
    for row, wanted in zip(rows_of(two), rows_of(one), strict=True):
        for key in ("train/loss", "grad/norm", "clip/coef"):
            assert row[key] == pytest.approx(wanted[key], rel=1e-3), key
        assert row["train/samples"] == wanted["train/samples"]
    # One wandb run, written by the process the user started.
    assert len(list((two / "wandb").glob("offline-run-*"))) == 1


def test_ranks_write_one_log_without_secrets_and_the_first_one_warns(environment):
    words = ["plugin=ddp", "plugin.nproc=2", "model._target_=tests.faulty.Faulty", "tracker=none"]
    secrets = {"WANDB_API_KEY": "5" * 40, "MY_TOKEN": "hush-hush"}
    folder, said = run(environment | secrets, *words, "+model.fault=warn", *SMALL)
    told = (folder / "runner.log").read_text()
    assert "layout: plugin=ddp on 2 ranks (dp_size=2, tp_size=1, pp_size=1, ep_size=1)" in told
    assert "] - rank 0: layout" in told
    assert "] - rank 0: planted warning of rank 0" in told
    assert "] - rank 1: planted warning of rank 1" in told
    assert "planted Python warning" in told
    assert "finished with exit code 0" in told
    assert "warning: planted warning of rank 0\n" in said
    assert "of rank 1" not in said
    assert not any(secret in told for secret in secrets.values())


def test_torchrun_ranks_are_joined(environment):
    before = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner")
    words = ["plugin=ddp", "model._target_=tests.faulty.Faulty", "+model.fault=warn"]
    folder, _ = run(environment, *SMALL, *words, before=before)
    told = (folder / "runner.log").read_text()
    assert "] - planted warning of rank 0" in told
    assert "] - rank 1: planted warning of rank 1" in told
    assert read(folder, "status.json")["state"] == "finished"
    assert read(folder, "summary.json")["world_size"] == 2
    assert len(rows_of(folder)) == 12


def wandb_exit_code(folder):
    (record,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    words = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(record)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=120)
    return json.loads(said.stdout)["exit_code"]


@pytest.mark.parametrize(
    ("fault", "rank", "cause"),
    [
        ("raise", 1, "RuntimeError: planted fault"),
        ("raise", 0, "RuntimeError: planted fault"),
        ("kill", 1, "SIGKILL"),
        ("kill", 0, "SIGKILL"),
    ],
)
@pytest.mark.product(every=4)
def test_a_rank_that_fails_ends_the_run(environment, fault, rank, cause):
    words = ["plugin=ddp", "plugin.nproc=2", "train.max_duration=10000ba"]
    words += ["model._target_=tests.faulty.Faulty", f"+model.fault={fault}", f"+model.rank={rank}"]
    with started(environment, [*words, "+model.at=150"]) as run:
        assert run.process.wait(120) == 1, run.printed
        status = run.status
        assert (status["state"], status["exit_code"], status["rank"]) == ("failed", 1, rank)
        assert cause in status["error"]
        assert f"rank {rank} {'was ended' if fault == 'kill' else 'failed'}" in run.printed
        assert "Traceback" not in run.printed
        assert not run.left()
        assert wandb_exit_code(run.folder) == 1


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("exit", "rank 1 exited with code 3"),
        ("exit_0", "rank 1 exited with code 0"),
        ("exit_none", "rank 1 exited with code 0"),
        ("die", "rank 1 exited with code 4; it printed last: no licence is left"),
    ],
)
@pytest.mark.product(every=4)
def test_a_rank_that_leaves_no_traceback_is_told_of_by_what_it_printed(environment, fault, cause):
    words = ["plugin=ddp", "plugin.nproc=2", "model._target_=tests.faulty.Faulty", "+model.at=1"]
    folder, said = run(environment, *words, f"+model.fault={fault}", "+model.rank=1", code=1)
    assert f"{cause} (see {folder / 'status.json'})" in said
    status = read(folder, "status.json")
    assert (status["state"], status["rank"]) == ("failed", 1)
    assert cause in status["error"]
    if fault == "die":
        assert "rank 1: no licence is left" in said


def test_a_run_in_place_that_fails(environment):
    words = ["model._target_=tests.faulty.Faulty", "+model.at=5"]
    folder, said = run(environment, *words, code=1)
    status = read(folder, "status.json")
    assert (status["state"], status["rank"]) == ("failed", 0)
    assert "planted fault" in status["error"]
    assert "Traceback" in status["error"]
    assert "Traceback" not in said
    told = (folder / "runner.log").read_text()
    assert "RuntimeError: planted fault" in told
    assert "Traceback" in told
    assert "failed with exit code 1" in told
    report, *_, why = said.splitlines()  # stdout, then stderr
    assert why == f"the run failed: RuntimeError: planted fault (see {folder / 'status.json'})"
    assert report == str(folder / "report.html")
    # The rows before the fault are not lost, though they were not due yet.
    assert [row["train/step"] for row in rows_of(folder)] == [1, 2, 3, 4]
    assert wandb_exit_code(folder) == 1


def test_an_interrupt_keeps_its_exit_code_though_nobody_reads_what_is_printed(environment):
    """As with ``| tee log``, which the same Ctrl-C ends."""
    words = ["device=cpu", "tracker=none", "train.max_duration=100000ba", "log.flush=5"]
    begun = subprocess.Popen(
        [sys.executable, "-m", "runner", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    begun.stdout.close()
    try:
        files = Path(environment["RUNNER_OUTPUTS"]).glob
        wait_for(lambda: any(one.stat().st_size for one in files("runs/*/metrics.jsonl")))
        begun.send_signal(signal.SIGINT)
        said = begun.stderr.read()
        assert begun.wait(120) == 130, said
        assert "Traceback" not in said
        assert "BrokenPipe" not in said
        assert read(only_run(environment), "status.json")["state"] == "interrupted"
    finally:
        begun.stderr.close()
        if begun.poll() is None:
            os.killpg(begun.pid, signal.SIGKILL)
            begun.wait()


def test_an_interrupt_before_the_record_begins_leaves_no_run_that_seems_to_run(
    monkeypatch, tmp_path
):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setenv("RUNNER_OUTPUTS", str(tmp_path))
    [job] = request(["tracker=none"], writes=False).jobs
    monkeypatch.setattr(supervise, "provenance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        supervise.run(job.config, job.plain, tmp_path)
    assert not (tmp_path / "status.json").exists()


@pytest.mark.parametrize(("watched", "erased"), [(True, "\r\x1b[K"), (False, "")])
def test_what_ranks_print_takes_the_place_of_the_bar(watched, erased, monkeypatch, capsys):
    monkeypatch.setattr(local_rank, "is_watched", lambda stream: watched)
    rank = local_rank.LocalRank.__new__(local_rank.LocalRank)
    rank.number, rank._printed = 1, deque()
    printed, stderr = Pipe(duplex=False)
    os.write(stderr.fileno(), b"a line\nhalf")
    stderr.close()
    rank._print(printed)
    assert capsys.readouterr().err == f"{erased}rank 1: a line\n{erased}rank 1: half\n"
    assert list(rank._printed) == ["a line", "half"]


def test_the_recipe_accumulate_4_shows_weights_that_move_every_fourth_microbatch(environment):
    folder, said = run(environment, "recipe=accumulate_4", "train.max_duration=3ba")
    lines = [line.split(": ", 1) for line in said.splitlines() if " microbatch " in line]
    values = [line[1].split() for line in lines if "/4" in line[0]]
    assert len(values) == 12
    assert all(len(row) == 10 for row in values)
    moved = [before != after for before, after in pairwise(values)]
    # The value after microbatch 4 is the one that microbatches 1 to 3 of the next step still show.
    assert moved == [False, False, True, False, False, False, True, False, False, False, True]
    assert len(rows_of(folder)) == 3


def test_the_sinks_agree_on_numbers_that_are_not_finite(environment):
    words = ["optimizer.lr=1e18", "scheduler=constant", "clip=none", *SMALL]
    folder, _ = run(environment, *words)
    last = rows_of(folder)[-1]
    assert last["grad/nonfinite"] > 0
    assert any(isinstance(row["grad/norm"], str) for row in rows_of(folder))
    assert all(math.isfinite(float(row["clip/ratio_total"])) for row in rows_of(folder))
