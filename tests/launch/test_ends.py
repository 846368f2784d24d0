"""How a run ends: a rank fails, dies or hangs, SIGKILL, or a signal asks it to stop."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.cli.main import main
from runner.run_folder.status import state_of
from tests.launch.ends import TORCHRUN, faulty, kill, only_run, read, rows_of, started
from tests.process import environment_at, inspected, wait_for

SINGLE = ["tracker=none", "plugin=single"]
DDP = ["tracker=none", "plugin=ddp", "plugin.nproc=2"]
LONG = ["train.max_duration=10000000ba", "log.flush=5"]
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 143}
LOST = "rank 1 hangs or was killed: the others lost the connection, or waited for more"
FAULTS = ["memory", "raise", "die", "kill", "hang", "none", "late"]
slow = pytest.mark.slow
RUNNING = "JobState=RUNNING"
swept = pytest.mark.xdist_group("ends")  # one worker makes the sweep


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """One sweep of runs with a fault each; the first and the last one in the command's process.

    That without a fault diverges.
    """
    zipped = "plugin,plugin.nproc,clip,optimizer.lr,launch.timeout,+model.fault"
    words = [f"sweep.zip=[{zipped}]", "clip.max_skips=12", "tracker=none"]
    words += [f"plugin=single{',ddp' * 5},single", f"plugin.nproc=unset{',2' * 5},unset"]
    words += [f"clip={'norm,' * 5}value,norm", f"optimizer.lr={'0.05,' * 5}1e6,0.05"]
    words += ["-m", *LONG, *faulty(",".join(FAULTS), *[8] * len(FAULTS), rank=-1)]
    words += [f"launch.timeout={','.join('20' if fault == 'hang' else '600' for fault in FAULTS)}"]
    with started(environment_at(tmp_path_factory.mktemp("failed")), words) as run:
        struck = run.home / "outputs" / "struck"
        for count in range(1, len(FAULTS)):  # one after the other, so that each may take its time
            run.wait_for(
                lambda count=count: struck.exists() and len(struck.read_text().split()) >= count
            )
        run.process.terminate()
        run.ends(143)
        [sweep] = (run.home / "outputs" / "sweeps").iterdir()
        folders = {fault: sweep / str(number) for number, fault in enumerate(FAULTS)}
        yield SimpleNamespace(folders=folders, printed=(run.home / "printed").read_text())


@swept
@pytest.mark.parametrize(
    ("fault", "rank", "cause"),
    [
        ("memory", 0, "can't allocate memory"),
        ("raise", 1, "RuntimeError: planted fault"),
        ("die", 1, "rank 1 exited with code 4"),
        ("kill", 1, "rank 1 was ended by SIGKILL"),
        ("hang", 1, LOST),
        ("late", 0, "RuntimeError: planted fault"),  # after a signal: it is no stop
    ],
)
def test_a_failed_run_names_the_rank_that_failed(failed, fault, rank, cause):
    folder = failed.folders[fault]
    status = read(folder)
    log = (folder / "runner.log").read_text()
    assert (status["state"], status["exit_code"], status["rank"]) == ("failed", 1, rank)
    assert cause in status["error"]
    assert "failed with exit code 1" in log
    for key in ("data.batch_size", "accumulation.steps", "plugin="):
        assert (key in status["error"]) == (fault in ("memory", "kill")), key
    if fault == "hang":
        assert LOST in status["error"].splitlines()[-1]
        before, _, after = status["error"].partition("where rank 1 is (most recent call first)")
        assert "where rank 0 is" in before
        assert "tests/faulty.py" in after


@swept
def test_a_run_that_only_skips_steps_fails(failed):
    folder = failed.folders["none"]
    status = read(folder)
    log = (folder / "runner.log").read_text()
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert rows_of(folder)[-1]["grad/nonfinite"] == 12
    assert "12 steps in" in log
    for text in (failed.printed, log):
        assert text.count(" was skipped: the gradient's norm is") == 1
        for part in (", from rank", "Its samples: ", "12 steps in"):
            assert part in text


FAILS = ["device=cpu", "plugin=single", *LONG, *faulty("raise", rank=0)]


def test_a_run_that_fails_keeps_its_rows(outputs, capsys):
    """Also those that were not due yet."""
    assert main(["tracker=none", *FAILS]) == 1
    folder = only_run(outputs)
    assert read(folder)["error"].endswith("RuntimeError: planted fault")
    assert "RuntimeError: planted fault" in capsys.readouterr().err
    assert [row["train/step"] for row in rows_of(folder)] == [*range(1, 8)]


def test_wandb_is_told_that_a_run_failed(own_home, outputs):
    assert main(["tracker.mode=offline", *FAILS]) == 1
    (file,) = only_run(outputs).glob("wandb/offline-run-*/*.wandb")
    assert inspected(file)["exit"][0]["exit_code"] == 1


def test_sigkill_of_the_command_ends_its_ranks(environment):
    with started(environment, [*DDP, *LONG]) as run:
        run.wait_for_rows()
        kill(run.process.pid)
        run.ends(-signal.SIGKILL)
        assert state_of(run.status) == "killed"


@pytest.mark.parametrize(
    ("ranks", "number", "to", "job", "again"),
    [
        (SINGLE, signal.SIGUSR1, "the command", "", True),
        (DDP, signal.SIGTERM, "all", f"{RUNNING} StartTime=20 PreemptTime=21", True),
        pytest.param(DDP, signal.SIGINT, "the command", "", False, marks=slow),
        *(
            pytest.param(SINGLE, signal.SIGTERM, "the command", job, False, marks=slow)
            for job in (
                f"{RUNNING} StartTime=20 PreemptTime=None",
                f"{RUNNING} StartTime=20 PreemptTime=19",
                "JobState=CANCELLED StartTime=20 PreemptTime=21",
            )
        ),
    ],
)
def test_a_signal_ends_the_run_after_its_step(environment, tmp_path, ranks, number, to, job, again):
    """With a checkpoint; after SIGUSR1 or a pre-emption Slurm is asked to start the job again."""
    program = tmp_path / "bin" / "scontrol"
    told = tmp_path / "told"
    program.parent.mkdir()
    text = f'#!/bin/sh\nif [ "$1" = --oneliner ]; then echo "{job}"; exit; fi\n'
    text += f'echo "$@" > {told}\ncat $RUNNER_OUTPUTS/runs/*/status.json >> {told}\n'
    program.write_text(text)
    program.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "PATH": f"{program.parent}:{environment['PATH']}"}
    with started(environment | slurm, [*ranks, *LONG], ignored=[signal.SIGHUP]) as run:
        run.wait_for_rows(5)
        if to == "all":
            os.killpg(run.process.pid, signal.SIGHUP)  # as nohup does: it remains ignored
            run.wait_for_rows(len(rows_of(run.folder)) + 20)
            os.killpg(run.process.pid, number)
        else:
            run.process.send_signal(number)
        run.ends(CODES[number])
        status = run.status
        rows = rows_of(run.folder)
        assert (status["state"], status["exit_code"]) == ("interrupted", CODES[number])
        assert [row["train/step"] for row in rows] == [*range(1, len(rows) + 1)]
        [saved] = (run.folder / "checkpoints").glob("step_*")
        assert saved.name == f"step_{len(rows):09d}"
    assert told.exists() == again
    if told.exists():  # after the record is complete
        assert told.read_text().startswith("requeue 7\n")
        assert '"state": "interrupted"' in told.read_text()


@pytest.mark.parametrize(
    ("again", "seconds", "why"),
    [(False, 4, "it had not ended after 4 s"), (True, 600, "a second signal")],
)
def test_a_run_that_does_not_end_is_ended(environment, again, seconds, why):
    words = [*SINGLE, *LONG, *faulty("hang", rank=0), f"shutdown.timeout={seconds}"]
    with started(environment, words) as run:
        run.wait_for((run.home / "outputs" / "struck").exists)
        run.process.terminate()
        if again:
            wait_for(lambda: run.process.poll() is not None or run.process.terminate())
        run.ends(143)
        assert (run.status["state"], run.status["exit_code"]) == ("interrupted", 143)
        assert run.status["error"].endswith(why)


@pytest.mark.parametrize(
    ("ranks", "number", "at"),
    [
        (SINGLE, signal.SIGTERM, "the first import"),
        pytest.param(SINGLE, signal.SIGINT, "torch", marks=slow),  # test_main has it too
        pytest.param(DDP, signal.SIGHUP, "data", marks=slow),
    ],
)
def test_a_signal_before_the_training(environment, ranks, number, at):
    words = [*ranks, *LONG, "data._target_=tests.faulty.slow_data"]
    with started(environment, words) as run:
        run.wait_for(run.handles_signals)
        if at == "torch":
            maps = Path(f"/proc/{run.process.pid}/maps")
            run.wait_for(lambda: "libtorch_cpu" in maps.read_text())
        if at == "data":
            run.wait_for((run.home / "outputs" / "reads").exists)
        run.process.send_signal(number)
        run.ends(CODES[number])
        for status in run.home.glob("outputs/runs/*/status.json"):
            assert read(status.parent)["exit_code"] == CODES[number]


@pytest.mark.parametrize("fault", ["kill", pytest.param("hang", marks=slow)])
def test_a_rank_of_torchrun_that_is_lost_is_named(environment, fault):
    words = ["plugin=ddp", *LONG, *faulty(fault), "tracker=none", "shutdown.timeout=4"]
    words += ["launch.timeout=15"] if fault == "hang" else []
    with started(environment, words, TORCHRUN) as run:
        run.wait_for((run.home / "outputs" / "struck").exists)
        assert run.process.wait(600) == 1, run.printed
        assert (run.status["state"], run.status["rank"]) == ("failed", 1)
        assert LOST in run.status["error"].splitlines()[-1]
        assert LOST in run.printed
        run.leaves_nothing()
