"""A sweep whose runs are jobs of a real Slurm of two nodes."""

import signal

import pytest

from tests.launch.ends import read
from tests.process import wait_for
from tests.slurm import running
from tests.sweep.conftest import SMALL, results

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]
pytest.importorskip("hydra_plugins.hydra_submitit_launcher")


def test_jobs_that_are_queued_again_or_die_end_as_with_the_basic_launcher(tmp_path, command):
    net = command.net("+model.number=0,1,2", n2="raise")
    words = ["-m", *net, *SMALL, "tracker=none", "train.max_duration=600ba"]
    slurm = [*words, "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=60"]
    with running(tmp_path / "slurm", command.environment) as jobs:
        command.environment = {**jobs.environment}
        started = command.start(*slurm, "sweep.name=slurm")
        folder = command.sweeps / "slurm"
        wait_for(lambda: command.has_rows(0) and command.has_rows(1), 300)
        array = read(folder / "0")["slurm_job_id"].split("_")[0]
        jobs("scancel", "--signal=USR1", f"{array}_0")
        jobs("scontrol", "requeue", f"{array}_1")
        for number in range(2):
            jobs.restart(f"{array}_{number}")
        _, printed = started.communicate(timeout=600)
        assert started.returncode == 1, printed
        assert [len(read(folder / number)["resumed"]) for number in "01"] == [1, 1]
        assert "planted fault" in read(folder, "sweep.json")["runs"][2]["error"]
        (command.marks / "2").unlink()
        _, printed = command(*slurm, "sweep.name=slurm")
        assert "2 of 3 runs are done already: 1 to go" in printed
    command(*words, "sweep.name=plain")
    assert results(folder) == results(command.sweeps / "plain")


def test_a_sweep_that_was_interrupted_waits_for_its_own_jobs_each_once(tmp_path, command):
    net = command.net("+model.number=0,1,2,3,4,5", n0="raise", n2="raise", n4="raise")
    words = ["-m", *net, *SMALL, "tracker=none", "train.max_duration=6ba", "sweep.name=slurm"]
    command(*words, code=1)
    for number in "02":
        (command.marks / number).unlink()
    (command.marks / "4").write_text("wait")
    words += ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=60"]
    folder = command.sweeps / "slurm"
    with running(tmp_path / "slurm", command.environment) as jobs:
        command.environment = {**jobs.environment}
        started = command.start(*words)
        wait_for((command.marks / "4.here").exists, 300)
        started.send_signal(signal.SIGINT)
        _, printed = started.communicate(timeout=600)
        assert started.returncode == 130, printed
        runs = read(folder, "sweep.json")["runs"]
        [array] = {run["job"].split("_")[0] for run in runs if run["job"]}
        numbered = [run["job"] for run in runs if run["number"] in (0, 2, 4)]
        assert numbered == [f"{array}_{index}" for index in range(3)]
        again = command.start(*words)
        wait_for(lambda: f"{array}_2" in jobs("squeue", "--array", "--noheader", "--format=%i"))
        (command.marks / "4").unlink()
        out, printed = again.communicate(timeout=600)
        assert jobs("squeue", "--noheader") == ""
    assert again.returncode == 0, printed
    assert "6 of 6 runs are done already: nothing to run" in printed
    assert out.count("finished") == 6
    assert read(folder, "sweep.json")["state"] == "finished"
    assert command.states() == ["finished"] * 6
    assert not (folder / "earlier" / "4-2").exists()


def test_a_sweep_whose_jobs_slurm_has_lost_ends(tmp_path, command):
    """It has no accounting that would say so."""
    words = ["-m", "seed=0,1", *SMALL, "tracker=none", "train.max_duration=100000ba"]
    with running(tmp_path / "slurm", command.environment) as jobs:
        command.environment = {**jobs.environment}
        started = command.start(*words, "hydra/launcher=submitit_slurm")
        wait_for(lambda: command.has_rows(0) and command.has_rows(1), 300)
        jobs("scancel", "--me")
        _, printed = started.communicate(timeout=600)
    assert started.returncode == 143, printed
    assert "Slurm has lost the jobs that are left" in printed
    assert command.states() == ["interrupted"] * 2
