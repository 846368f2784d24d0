"""Whole sweeps as a user starts them, kills them, and starts them again."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from runner.cli.main import main
from runner.run_folder import status
from tests.launch.ends import read, rows_of, started
from tests.launch.test_secrets import leaks
from tests.process import inspected, run_here
from tests.sweep.conftest import PLAIN, SMALL, results

pytestmark = pytest.mark.xdist_group("sweep")
QUIET = [*SMALL, "tracker=none"]
SHORT = [*QUIET, "train.max_duration=6ba"]

# Runs the command, and fails where it had to import torch.
WITHOUT_TORCH = """
import sys; from runner.cli.main import main
code = main(sys.argv[1:]); sys.exit(99 if "torch" in sys.modules else code)
"""


def begun(err):
    """The numbers of the runs that began."""
    return [int(number) for number in re.findall(r"\((\d+) of \d+\)(?!.*failed)", err)]


def test_the_runs_of_a_sweep_begin_in_their_order(plain):
    _, err = plain.said
    assert begun(err) == [1, 2, 3, 4], err
    assert "best so far" in err


def test_the_record_of_a_sweep_says_what_its_runs_came_to(plain):
    out, _ = plain.said
    record = plain.record()
    assert plain.states() == ["finished"] * 4
    assert record["state"] == "finished"
    assert record["words"][: len(PLAIN)] == PLAIN
    for run in record["runs"]:
        folder = plain.folder / run["folder"]
        assert run["objective"] == read(folder, "summary.json")["best"]["eval/loss"]
        assert f"{run['objective']:.4g}" in out
        assert run["config_hash"] == read(folder)["config_hash"]


def test_both_plugins_of_a_sweep_come_to_the_same_losses(plain):
    losses = [run["objective"] for run in plain.record()["runs"]]
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-3)


def test_the_runs_of_a_sweep_are_one_group_of_wandb(plain):
    for run in plain.record()["runs"]:
        (file,) = (plain.folder / run["folder"]).glob("wandb/offline-run-*/*.wandb")
        assert inspected(file)["run"][0]["run_group"] == "mine"


def test_a_finished_sweep_is_not_run_again(plain):
    """It prints its answer, and writes its page anew."""
    out, _ = plain.said
    record = plain.record()
    page = (plain.folder / "report.html").stat()
    assert page.st_size > 10_000
    again, err = plain(*plain.words, before=("-c", WITHOUT_TORCH))
    assert err == "4 of 4 runs are done already: nothing to run\n"
    assert again == out
    assert (plain.folder / "report.html").stat().st_mtime_ns > page.st_mtime_ns
    assert plain.record()["runs"] == record["runs"]


def test_a_program_reads_the_answer_of_a_sweep_as_json(plain):
    out, _ = run_here(*plain.words, "--json", env=plain.environment)
    content = json.loads(out)
    assert content["folder"] == str(plain.folder)
    assert content["verdict"].startswith("Which setting? ")
    objectives = [run["objective"] for run in plain.record()["runs"]]
    assert sorted(row["mean"] for row in content["settings"]) == sorted(objectives)
    for row in content["settings"]:
        assert {"setting", "sd", "clipped", "worth"} <= row.keys()


def test_a_sweep_leaves_no_secret_in_any_file(plain):
    assert leaks(plain.planted, plain.sweeps) == {}
    assert all("+model.others.api_key=***" in run["words"] for run in plain.record()["runs"])


def test_joblib_runs_what_is_left_two_at_once_with_the_same_results(plain, command, here):
    """Runs 0 and 2 of four failed before; each waits for the other one before its first step."""
    command.environment["RUNNER_CORES"] = "2"
    net = command.net("+model.number=${hydra:job.num}", n0="raise", n2="raise")
    words = ["plugin=single" if word.startswith("plugin=") else word for word in PLAIN]
    words += ["tracker=none", "seed=0,1", *net]
    here(*words, code=1)
    for number in "02":
        (command.marks / number).write_text("meet")
    joblib = [*words, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    _, printed = command(*joblib)
    assert "2 of 4 runs are done already: 2 to go" in printed
    for number in (0, 2):
        assert re.search(rf"^run {number} \(", printed, re.M)
        assert re.search(rf"^run {number}: finished after 6 steps", printed, re.M)
    joined = results(command.folder)[::2]
    apart = results(plain.folder)[:2]
    assert [result[3:] for result in joined] == [result[3:] for result in apart]


def test_a_sweep_with_failures_that_is_killed_is_finished_by_the_same_command(command, here):
    """A run without a checkpoint starts again, and leaves its record in ``earlier``."""
    words = ["-m", *command.net("+model.number=0,1,2", n1="raise"), *QUIET, "checkpoint.keep=9"]
    words += ["train.max_duration=12ba", "checkpoint.interval=2ba"]
    out, err = here(*words, "sweep.max_failures=0", code=1)
    assert begun(err) == [1, 2], err
    failures = [line for line in err.splitlines() if "planted fault" in line]
    assert failures == ["run 1 (2 of 3): +model.number=1   failed: ValueError: planted fault"]
    assert command.states() == ["finished", "failed", "waiting"]
    assert re.search(r"^Run 1 failed at step .*: ValueError: planted fault$", out, re.M)
    assert "planted fault" in (command.folder / "report.html").read_text()

    (command.marks / "1").write_text("kill")
    command(*words, code=-signal.SIGKILL)  # another limit is the same sweep
    assert command.states() == ["finished", "running", "waiting"]
    assert read(command.folder / "earlier" / "1-1")["state"] == "failed"
    before = [read(command.folder / name) for name in "01"]
    assert before[1]["state"] == "running"

    (command.marks / "1").unlink()
    _, err = here(*words)
    assert err.startswith("1 of 3 runs is done already: 2 to go\n")
    assert begun(err) == [2, 3], err
    assert command.states() == ["finished"] * 3
    assert read(command.folder / "0") == before[0]
    after = read(command.folder / "1")
    [step] = after["resumed"]
    assert f"continuing after step {step} from {command.folder / '1'}" in err
    assert after["started"] == before[1]["started"]
    assert [row["train/step"] for row in rows_of(command.folder / "1")] == [*range(1, 13)]


class Edit:
    """Changes, when a run ends, a file that the configuration of the next one refers to."""

    def on_end(self, trainer, summary):
        Path(os.environ["PLANTED_RATE"]).write_text("0.2")


def test_a_run_that_is_not_the_planned_one_fails(command, here, tmp_path, monkeypatch):
    rate = tmp_path / "rate"
    rate.write_text("0.1")
    monkeypatch.setenv("PLANTED_RATE", str(rate))
    OmegaConf.register_new_resolver("test.rate", lambda: float(rate.read_text()), replace=True)
    callback = f"callbacks=[{{_target_:{__name__}.Edit}}]"
    _, err = here("-m", "seed=1,2", "optimizer.lr=${test.rate:}", callback, *SHORT, code=1)
    assert command.states() == ["finished", "failed"]
    assert "run 1 (2 of 2): seed=2   failed: RuntimeError: this is not the run that was" in err
    assert not (command.folder / "1" / "status.json").exists()
    for run in command.record()["runs"][:1]:
        assert run["config_hash"] == read(command.folder / run["folder"])["config_hash"]


def test_an_interrupt_ends_a_sweep_at_once(command, here, monkeypatch):
    words = ["-m", "train.max_duration=6ba,100000ba", *QUIET]
    monkeypatch.setattr(status, "RELEASED", 0.1)
    with started(command.environment, words) as run:
        run.wait_for(lambda: command.has_rows(1))
        page = (command.folder / "report.html").read_text()
        assert "still running when this page was written, with 1 run left" in page
        assert "another process is using this folder" in here(*words, code=2).err
        run.process.send_signal(signal.SIGINT)
        run.ends(130)
    printed = run.printed.splitlines()
    ending = "the sweep was interrupted after 1 of 2 runs; the same command runs the rest"
    assert ending in printed
    assert re.search(r"^run 1: interrupted after \d+ of 100000 steps$", run.printed, re.M)
    assert printed[-1] == str(command.folder / "report.html")
    assert "still running" not in (command.folder / "report.html").read_text()
    assert command.record()["state"] == "interrupted"
    assert command.states() == ["finished", "interrupted"]


def test_a_search_learns_from_runs_that_went_well(command, here):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=5", *SHORT]
    words += ["hydra.sweeper.sampler.seed=1", "clip.threshold=tag(log,interval(0.1,4))"]
    words += command.net("+model.number=${hydra:job.num}", n1="raise", n3="nan")
    out, err = command(*words, code=1)
    assert begun(err) == list(range(1, 6))
    assert "\x1b" not in err  # Optuna's colours
    labels = re.findall(r"^(\d+\.\d+),? ", out, re.M)  # of settings, best first
    assert len(labels) == 5
    assert max(map(len, labels)) <= 8
    runs = command.record()["runs"]
    assert command.states() == ["finished", "failed", *["finished"] * 3]
    assert runs[3]["objective"] == "NaN"
    best = min((runs[number] for number in (0, 2, 4)), key=lambda run: run["objective"])
    results = (command.folder / "optimization_results.yaml").read_text()
    assert f"best_value: {best['objective']}" in results
    [threshold] = [word.partition("=")[2] for word in best["overrides"] if "threshold" in word]
    assert float(labels[0]) == pytest.approx(float(threshold), rel=1e-3)
    _, err = here(*words, code=1)  # it came to its end
    assert begun(err) == []


def test_a_wrong_launcher_is_refused(outputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    for words, expected in (
        (["hydra/launcher=ray"], "joblib"),
        (["hydra/launcher=submitit_slurm"], "no sbatch here"),
        (["hydra/launcher=joblib", "hydra.launcher.n_job=2"], "hydra.launcher.n_job"),
    ):
        assert main(["-m", "seed=1,2", *words]) == 2
        assert expected in capsys.readouterr().err
    assert not outputs.exists()
