"""Whole sweeps as a user starts them, kills them, and starts them again."""

import json
import os
import re
import signal

import pytest

from tests.process import wait_for

SMALL = ["tracker=none", "data.batch_size=16", "eval.interval=100ba"]
SIX = [*SMALL, "train.max_duration=6ba"]
FLAKY = ["model._target_=tests.sweep.flaky.Flaky"]

# Runs the command, and fails where it had to import torch.
WITHOUT_TORCH = (
    "import sys; from runner.cli.main import main; code = main(sys.argv[1:]); "
    "sys.exit(99 if 'torch' in sys.modules else code)"
)

# Runs the command where no page can be written.
WITHOUT_PAGES = """
import sys
import runner.report
from runner.cli.main import main
def write(folder, left=0):
    raise OSError("no space left")
runner.report.write = write
sys.exit(main(sys.argv[1:]))
"""


def until(true, process):
    wait_for(lambda: true() or process.poll() is not None)
    assert process.poll() is None, process.communicate()


def has_rows(command, number):
    return any(file.stat().st_size for file in command.sweeps.glob(f"*/{number}/metrics.jsonl"))


def begun(err):
    """The numbers of the runs that began."""
    return [int(number) for number in re.findall(r"\((\d+) of \d+\)(?!.*failed)", err)]


def read(folder, name):
    return json.loads((folder / name).read_text())


def test_a_killed_sweep_is_finished_by_the_same_command(command):
    words = ["recipe=sweep_norm", *SMALL, "train.max_duration=150ba", "log.flush=1"]
    started = command.start(*words)
    until(lambda: has_rows(command, 2), started)
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()
    assert command.states() == ["finished", "finished", "running", "waiting"]
    assert read(command.folder / "2", "status.json")["state"] == "running"
    before = read(command.folder / "0", "status.json")

    out, err = command(*words)
    assert err.startswith("2 of 4 runs are done already: 2 to go\n")
    assert begun(err) == [3, 4], err
    assert "best so far" in err
    assert command.states() == ["finished"] * 4
    assert read(command.folder / "0", "status.json") == before
    rows = (command.folder / "2" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(row)["train/step"] for row in rows]
    assert steps == list(range(1, 151))  # nothing of the run that was killed
    assert read(command.folder / "earlier" / "2-1", "status.json")["state"] == "running"

    record = command.record()
    assert record["state"] == "finished"
    assert record["words"] == words
    for run in record["runs"]:
        summary = read(command.folder / run["folder"], "summary.json")
        assert run["objective"] == summary["best"]["eval/loss"]
        assert f"{run['objective']:.4g}" in out
        assert (
            run["config_hash"] == read(command.folder / run["folder"], "status.json")["config_hash"]
        )
    assert (command.folder / "report.html").stat().st_size > 10_000
    assert (command.folder / "multirun.yaml").is_file()
    assert (command.folder / "3" / ".hydra" / "overrides.yaml").is_file()

    page = (command.folder / "report.html").stat().st_mtime_ns
    again, err = command(*words, before=("-c", WITHOUT_TORCH))
    assert err == "4 of 4 runs are done already: nothing to run\n"
    assert begun(err) == []
    assert again == out
    assert (command.folder / "report.html").stat().st_mtime_ns > page
    assert command.record()["runs"] == record["runs"]


def test_failures_are_told_at_once_counted_and_tried_again(command):
    words = ["-m", "+model.trial=0,1,2", "+model.fails=1", *FLAKY, *SIX]
    out, err = command(*words, "sweep.max_failures=0", code=1)
    assert begun(err) == [1, 2], err
    failures = [line for line in err.splitlines() if "planted fault" in line]
    assert failures == ["run 1 (2 of 3): +model.trial=1   failed: RuntimeError: planted fault"]
    assert command.states() == ["finished", "failed", "waiting"]
    assert re.search(r"^1 .*failed .*RuntimeError: planted fault$", out, re.M)

    out, err = command(*words, code=1)  # another limit is the same sweep
    assert begun(err) == [2, 3], err
    assert command.states() == ["finished", "failed", "finished"]
    record = command.record()
    assert record["state"] == "failed"
    assert record["runs"][1]["error"] == "RuntimeError: planted fault"
    assert record["runs"][1]["exit_code"] == 1
    assert "planted fault" in (command.folder / "report.html").read_text()


def test_a_killed_run_of_a_sweep_continues_from_its_checkpoint(command):
    words = ["-m", "seed=1,2", *SMALL, "train.max_duration=150ba", "log.flush=1"]
    words += ["checkpoint.interval=10ba"]
    started = command.start(*words)
    until(lambda: any(command.sweeps.glob("*/0/checkpoints/step_*")), started)
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()
    before = read(command.folder / "0", "status.json")

    _, err = command(*words)
    assert command.states() == ["finished", "finished"]
    status = read(command.folder / "0", "status.json")
    [step] = status["resumed"]
    assert f"continuing after step {step} from {command.folder / '0'}" in err
    assert status["started"] == before["started"]
    assert not (command.folder / "earlier").exists()
    rows = (command.folder / "0" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["train/step"] for row in rows] == list(range(1, 151))
    (command.folder / "1" / "summary.json").unlink()
    _, err = command(*words)
    assert err.startswith("1 of 2 runs is done already: 1 to go")
    assert read(command.folder / "1", "summary.json")["steps"] == 150


def test_an_interrupt_ends_a_sweep_at_once(command):
    words = ["-m", "seed=1,2", *SMALL, "train.max_duration=100000ba", "log.flush=1"]
    started = command.start(*words)
    until(lambda: has_rows(command, 0), started)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=120)
    assert started.returncode == 130
    ending = "the sweep was interrupted after 0 of 2 runs; the same command runs the rest"
    assert err.splitlines()[-1] == ending
    assert re.search(r"^run 0: interrupted after \d+ of 100000 steps$", err, re.M)
    assert out.splitlines()[-1] == str(command.folder / "report.html")
    assert command.record()["state"] == "interrupted"
    assert command.states() == ["interrupted", "waiting"]
    assert command.record()["runs"][0]["exit_code"] == 130


def test_a_sweep_keeps_its_exit_code_though_nobody_reads_what_it_prints(command):
    """As with ``2>&1 | tee log``, which the same Ctrl-C ends."""
    started = command.start("-m", "seed=1,2", *SMALL, "train.max_duration=100000ba", "log.flush=1")
    until(lambda: has_rows(command, 0), started)
    started.stdout.close()
    started.stderr.close()
    started.send_signal(signal.SIGINT)
    assert started.wait(120) == 130
    assert command.record()["state"] == "interrupted"
    assert command.states() == ["interrupted", "waiting"]


def test_the_page_grows_with_each_run(command):
    words = ["-m", "train.max_duration=6ba,100000ba", *SMALL, "log.flush=1"]
    started = command.start(*words)
    try:
        until(lambda: has_rows(command, 1), started)
        page = (command.folder / "report.html").read_text()
        assert "still running when this page was written, with 1 run left" in page
        started.send_signal(signal.SIGINT)
        started.communicate(timeout=120)
        assert "still running" not in (command.folder / "report.html").read_text()
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)


def test_a_page_that_cannot_be_written_never_stops_a_sweep(command):
    out, err = command("-m", "seed=1,2", *SIX, before=("-c", WITHOUT_PAGES))
    assert command.states() == ["finished", "finished"]
    assert out.splitlines()[-1] == str(command.folder)
    assert err.count("could not be written") >= 2


@pytest.mark.slow
def test_two_processes_never_run_one_sweep(command):
    words = ["-m", "seed=1,2", *SMALL, "train.max_duration=100000ba", "log.flush=1"]
    started = command.start(*words)
    try:
        until(lambda: has_rows(command, 0), started)
        _, err = command(*words, code=2)
        assert "another process is running this sweep" in err
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


def test_one_sweep_runs_plugins_of_both_kinds(command):
    command("-m", "plugin=single,ddp", *SIX)
    assert command.states() == ["finished", "finished"]
    one, two = (read(command.folder / name, "summary.json") for name in "01")
    assert one["best"]["eval/loss"] == pytest.approx(two["best"]["eval/loss"], rel=1e-3)


def test_a_wrong_value_in_any_run_is_found_before_the_first(command):
    _, err = command("-m", "seed=1,2", "model=cnn,gpt", *SIX, code=2)
    assert "(in the job" in err
    assert not command.sweeps.exists()


def test_a_search_learns_from_runs_that_went_well(command):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=8"]
    words += ["hydra.sweeper.sampler.seed=1", "clip.threshold=tag(log,interval(0.1,4))", *SIX]
    words += [*FLAKY, "+model.trial=${hydra:job.num}", "+model.fails=2", "+model.nan=5"]
    out, err = command(*words, code=1)
    assert begun(err) == list(range(1, 9))
    assert "Traceback" not in err
    record = command.record()
    states = command.states()
    assert states == ["finished"] * 2 + ["failed"] + ["finished"] * 5
    assert record["runs"][5]["objective"] == "NaN"
    best = min(
        (run for number, run in enumerate(record["runs"]) if number not in (2, 5)),
        key=lambda run: run["objective"],
    )
    results = (command.folder / "optimization_results.yaml").read_text()
    assert f"best_value: {best['objective']}" in results
    assert re.search(rf"^{best['number']} .*\(best\)", out, re.M)
    assert best["overrides"][0].startswith("clip.threshold=")
    assert len(best["overrides"]) == 1

    _, err = command(*words, code=1, before=("-c", WITHOUT_TORCH))  # it came to its end
    assert begun(err) == []


def test_runs_leave_to_their_sweep_what_it_varies(command):
    """Every step is clipped: a run of its own would advise on the threshold and the rate."""
    words = [*SMALL, "train.max_duration=55ba", "log.flush=100"]
    _, err = command("-m", "clip.threshold=0.001,0.002", *words)
    assert "optimizer.lr" not in err.replace("clip.threshold=0.00", "")
    assert "raise clip.threshold" not in err
    summary = read(command.folder / "0", "summary.json")
    assert [remark["topic"] for remark in summary["remarks"]] == ["limits"]
    assert summary["guidance"] == []
    page = (command.folder / "report.html").read_text()
    assert "this sweep varied only clip.threshold: vary optimizer.lr as well" in page
    assert "lower optimizer.lr" not in page
    _, err = command("clip.threshold=0.001", *words)
    assert "raise clip.threshold to about" in " ".join(err.split())
