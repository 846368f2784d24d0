"""Sweeps whose runs are jobs of a real Slurm of two nodes."""

import json
import signal

import pytest

from tests.slurm import running, wait_for
from tests.sweep.test_engines import SWEEP, results, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("hydra_plugins.hydra_submitit_launcher")

SLURM = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=60"]
LONG = ["clip.threshold=0.25,1.0", "train.max_duration=150ba", "log.flush=5"]
QUIET = ["tracker=none", "device=cpu"]


@pytest.fixture
def slurm(tmp_path, command):
    with running(tmp_path / "slurm", command.environment) as slurm:
        command.environment = {**slurm.environment}
        yield slurm


def submitted(folder):
    """The jobs of a sweep that submitit has made a folder for."""
    return sorted(each.name for each in (folder / ".submitit").iterdir() if each.name[0] != ".")


def test_a_sweep_of_jobs_gives_the_page_and_numbers_of_the_basic_launcher(slurm, command):
    command("-m", *SWEEP, "sweep.name=plain")
    _, printed = command("-m", *SWEEP, *SLURM, "sweep.name=slurm", limit=400)
    folder = command.sweeps / "slurm"
    assert results(folder) == results(command.sweeps / "plain")
    wait_for(lambda: not slurm.waiting(), 60, slurm.waiting)
    array = submitted(folder)[0].partition("_")[0]
    assert submitted(folder) == [array, *(f"{array}_{number}" for number in range(4))]
    for number, threshold in enumerate((0.1, 0.25, 1.0, 2.0)):
        named = f"run {number} ({number + 1} of 4): clip.threshold={threshold}"
        assert f"{named}   finished   eval/loss" in printed
        job = json.loads((folder / str(number) / "status.json").read_text())["slurm_job_id"]
        assert job == f"{array}_{number}"
    pages = [(command.sweeps / name / "report.html").read_text() for name in ("plain", "slurm")]
    for page in pages:
        assert all(f"clip.threshold={each}" in page for each in (0.1, 0.25, 1.0, 2.0))
    before = (folder / "sweep.json").read_text()
    _, printed = command("-m", *SWEEP, *SLURM, "sweep.name=slurm")
    assert "4 of 4 runs are done already: nothing to run" in printed
    assert (folder / "sweep.json").read_text() == before
    assert len(submitted(folder)) == 5


def test_jobs_that_are_pre_empted_or_queued_again_go_on_where_they_were(slurm, command):
    command("-m", *LONG, *QUIET, "sweep.name=plain", limit=400)
    started = command.start("-m", *LONG, *QUIET, *SLURM, "sweep.name=slurm")
    folder = command.sweeps / "slurm"

    def steps(number):
        file = folder / str(number) / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    wait_for(lambda: steps(0) > 10 and steps(1) > 10, 300)
    array = json.loads((folder / "0" / "status.json").read_text())["slurm_job_id"].split("_")[0]
    slurm("scancel", "--signal=USR1", f"{array}_0")
    slurm("scontrol", "requeue", f"{array}_1")
    for number in range(2):
        job = f"{array}_{number}"
        wait_for(lambda job=job: "Restarts=1" in slurm.job(job), 120)
        slurm.restart(job)
    _, printed = started.communicate(timeout=400)
    assert started.returncode == 0, printed
    for number in range(2):
        status = json.loads((folder / str(number) / "status.json").read_text())
        assert len(status["resumed"]) == 1
        assert 10 < status["resumed"][0] < 150
        assert f"run {number} ({number + 1} of 2)" in printed
    assert "interrupted" in printed
    assert results(folder) == results(command.sweeps / "plain")


def test_a_failing_job_and_one_that_dies_are_named_and_run_again(slurm, command, tmp_path):
    words = ["-m", "seed=0,1,2", "train.max_duration=4ba", *QUIET, *SLURM, "sweep.name=slurm"]
    marks = tmp_path / "marks"
    marks.mkdir()
    words += ["model._target_=tests.sweep.failing.Net", f"+model.marks={marks}"]
    words += ["+model.seed=${seed}"]
    (marks / "1").write_text("raise")
    (marks / "2").write_text("kill")
    _, printed = command(*words, code=1, limit=400)
    assert command.states() == ["finished", "failed", "failed"]
    assert "run 1 (2 of 3): seed=1   failed: ValueError: this seed fails" in printed
    [array, *_] = submitted(command.folder)
    killed = command.record()["runs"][2]["error"]
    assert f"its job {array}_2 ended without a record" in killed
    assert f"run 2 (3 of 3): seed=2   failed: its job {array}_2" in printed
    for mark in marks.iterdir():
        mark.unlink()
    _, printed = command(*words, limit=400)
    assert "1 of 3 runs is done already: 2 to go" in printed
    assert command.states() == ["finished"] * 3


def test_jobs_go_on_without_the_command_which_waits_for_them_again(slurm, command):
    steps = 1000
    words = ["-m", "seed=0,1", f"train.max_duration={steps}ba", "eval.interval=500ba"]
    words += [*QUIET, *SLURM]
    started = command.start(*words)
    wait_for(lambda: len(slurm.waiting()) == 2 and len(command.states()) == 2, 200)
    wait_for(lambda: all((command.folder / n / "metrics.jsonl").exists() for n in "01"), 200)
    started.send_signal(signal.SIGINT)
    _, printed = started.communicate(timeout=120)
    assert started.returncode == 130, printed
    assert "2 runs go on in Slurm; the same command waits for them (scancel" in printed
    assert len(slurm.waiting()) == 2
    before = submitted(command.folder)
    _, printed = command(*words, limit=400)
    assert "2 runs go on in Slurm" in printed
    assert "submitted" not in printed
    assert submitted(command.folder) == before
    assert command.states() == ["finished"] * 2
    for number in "01":
        assert "resumed" not in json.loads((command.folder / number / "status.json").read_text())
        assert len(rows(command.folder / number)) == steps
