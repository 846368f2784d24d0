"""Sweeps whose runs are jobs of a real Slurm of two nodes."""

import signal

import pytest

from tests.launch.ends import read, rows_of
from tests.slurm import running, wait_for
from tests.sweep.conftest import SMALL, results

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("slurm")]
pytest.importorskip("hydra_plugins.hydra_submitit_launcher")

SLURM = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=60", "sweep.name=slurm"]
QUIET = [*SMALL, "tracker=none"]


@pytest.fixture
def slurm(tmp_path, command):
    with running(tmp_path / "slurm", command.environment) as slurm:
        command.environment = {**slurm.environment}
        yield slurm


def submitted(folder):
    """The jobs of a sweep that submitit has made a folder for."""
    return sorted(each.name for each in (folder / ".submitit").iterdir() if each.name[0] != ".")


def test_jobs_that_are_pre_empted_or_queued_again_end_as_with_the_basic_launcher(slurm, command):
    words = ["-m", "clip.threshold=0.25,1.0", *QUIET, "train.max_duration=150ba"]
    command(*words, "sweep.name=plain", limit=400)
    started = command.start(*words, *SLURM)
    folder = command.sweeps / "slurm"

    def steps(number):
        file = folder / str(number) / "metrics.jsonl"
        return len(rows_of(file.parent)) if file.exists() else 0

    wait_for(lambda: steps(0) > 10 and steps(1) > 10, 300)
    array = read(folder / "0")["slurm_job_id"].split("_")[0]
    slurm("scancel", "--signal=USR1", f"{array}_0")
    slurm("scontrol", "requeue", f"{array}_1")
    for number in range(2):
        job = f"{array}_{number}"
        wait_for(lambda job=job: "Restarts=1" in slurm.job(job), 120)
        slurm.restart(job)
    _, printed = started.communicate(timeout=400)
    assert started.returncode == 0, printed
    for number in range(2):
        [step] = read(folder / str(number))["resumed"]
        assert 10 < step < 150
        assert f"run {number} ({number + 1} of 2)" in printed
    assert results(folder) == results(command.sweeps / "plain")
    assert submitted(folder) == [array, f"{array}_0", f"{array}_1"]
    _, printed = command(*words, *SLURM)
    assert "2 of 2 runs are done already: nothing to run" in printed
    assert len(submitted(folder)) == 3


def test_a_failing_job_and_one_that_dies_are_named_and_run_again(slurm, command):
    net = command.net("+model.number=0,1,2", n1="raise", n2="kill")
    words = ["-m", *net, *QUIET, *SLURM]
    _, printed = command(*words, code=1, limit=400)
    assert command.states() == ["finished", "failed", "failed"]
    assert "failed: ValueError: planted fault" in printed
    [array, *_] = submitted(command.folder)
    assert f"its job {array}_2 ended without a record" in command.record()["runs"][2]["error"]
    for mark in command.marks.iterdir():
        mark.unlink()
    _, printed = command(*words, limit=400)
    assert "1 of 3 runs is done already: 2 to go" in printed
    assert command.states() == ["finished"] * 3


def test_jobs_go_on_without_the_command_which_waits_for_them_again(slurm, command):
    words = ["-m", "seed=0,1", *QUIET, "train.max_duration=1000ba", *SLURM]
    started = command.start(*words)
    wait_for(lambda: command.has_rows(0) and command.has_rows(1), 300)
    started.send_signal(signal.SIGINT)
    _, printed = started.communicate(timeout=120)
    assert started.returncode == 130, printed
    assert len(slurm.waiting()) == 2
    before = submitted(command.folder)
    _, printed = command(*words, limit=400)
    assert "2 runs go on in Slurm" in printed
    assert submitted(command.folder) == before
    assert command.states() == ["finished"] * 2
    for number in "01":
        assert "resumed" not in read(command.folder / number)
        assert len(rows_of(command.folder / number)) == 1000
