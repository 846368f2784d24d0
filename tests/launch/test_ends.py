"""How a run ends: a rank fails, dies or hangs, SIGKILL, or a signal asks it to stop."""

import os
import signal
from pathlib import Path

import pytest

from runner.run_folder.status import state_of
from tests.launch.ends import TORCHRUN, faulty, kill, read, rows_of, started
from tests.process import inspected, wait_for

SINGLE = ["tracker=none", "plugin=single"]
DDP = ["tracker=none", "plugin=ddp", "plugin.nproc=2"]
LONG = ["train.max_duration=10000000ba", "log.flush=5"]
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 143}
LOST = "rank 1 hangs or was killed: the others lost the connection, or waited for more"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "fault", "rank", "cause"),
    [
        (SINGLE, "raise", 0, "RuntimeError: planted fault"),
        (SINGLE, "memory", 0, "can't allocate memory"),
        (DDP, "raise", 1, "RuntimeError: planted fault"),
        (DDP, "die", 1, "rank 1 exited with code 4"),
    ],
)
def test_a_rank_that_fails_ends_the_run(environment, ranks, fault, rank, cause):
    tracked = ranks == SINGLE and fault == "raise"
    words = [*ranks, *LONG, *faulty(fault, rank=rank), *(["tracker=wandb"] if tracked else [])]
    with started(environment, words) as run:
        run.ends(1)
        status = run.status
        assert (status["state"], status["exit_code"], status["rank"]) == ("failed", 1, rank)
        assert cause in status["error"]
        assert fault == "memory" or cause in run.printed
        after = run.printed.partition("parameters, ")[2]  # the first line names the plugin
        for key in ("data.batch_size", "accumulation.steps", "plugin="):
            assert (key in after) == (fault == "memory")
        assert "failed with exit code 1" in (run.folder / "runner.log").read_text()
        # The rows before the fault are not lost, though they were not due yet.
        if ranks == SINGLE:
            assert [row["train/step"] for row in rows_of(run.folder)] == [*range(1, 8)]
        if tracked:
            (file,) = run.folder.glob("wandb/offline-run-*/*.wandb")
            assert inspected(file)["exit"][0]["exit_code"] == 1


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [(DDP, "hang"), pytest.param(DDP, "halt", marks=slow)],
)
def test_a_rank_that_hangs_is_named_with_its_stack(environment, ranks, fault):
    with started(environment, [*ranks, *LONG, *faulty(fault), "launch.timeout=8"]) as run:
        run.ends(1)
        assert (run.status["state"], run.status["rank"]) == ("failed", 1)
        assert LOST in run.printed
        assert LOST in run.status["error"].splitlines()[-1]
        before, _, after = run.status["error"].partition("where rank 1 is (most recent call first)")
        assert "where rank 0 is" in before
        assert fault == "halt" or "tests/faulty.py" in after


@pytest.mark.parametrize("victim", ["rank 1", "launcher", "in place"])
def test_sigkill_of_one_process_ends_all(environment, victim):
    with started(environment, [*(SINGLE if victim == "in place" else DDP), *LONG]) as run:
        run.wait_for_rows()
        if victim == "rank 1":
            kill(run.ranks()[1])
            run.ends(1)
            assert (run.status["state"], run.status["rank"]) == ("failed", 1)
            assert "rank 1 was ended by SIGKILL" in run.status["error"]
        else:
            kill(run.process.pid)
            run.ends(-signal.SIGKILL)
            assert state_of(run.status) == "killed"


@pytest.mark.parametrize(
    ("ranks", "number", "to"),
    [
        (SINGLE, signal.SIGINT, "launcher"),
        (SINGLE, signal.SIGUSR1, "launcher"),
        (DDP, signal.SIGTERM, "all"),
        (DDP, signal.SIGHUP, "launcher"),
    ],
)
def test_a_signal_ends_the_run_after_its_step(environment, tmp_path, ranks, number, to):
    """With a checkpoint; Slurm is asked to start the job again after SIGUSR1 alone."""
    program, told = tmp_path / "bin" / "scontrol", tmp_path / "told"
    program.parent.mkdir()
    text = f'#!/bin/sh\necho "$@" > {told}\ncat $RUNNER_OUTPUTS/runs/*/status.json >> {told}\n'
    program.write_text(text)
    program.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "PATH": f"{program.parent}:{environment['PATH']}"}
    with started(environment | slurm, [*ranks, *LONG]) as run:
        run.wait_for_rows(10)
        if to == "all":
            os.killpg(run.process.pid, number)
        else:
            run.process.send_signal(number)
        run.ends(CODES[number])
        status, rows = run.status, rows_of(run.folder)
        assert (status["state"], status["exit_code"]) == ("interrupted", CODES[number])
        assert [row["train/step"] for row in rows] == [*range(1, len(rows) + 1)]
        [saved] = (run.folder / "checkpoints").glob("step_*")
        assert saved.name == f"step_{len(rows):09d}"
    assert told.exists() == (number == signal.SIGUSR1)
    if told.exists():  # after the record is complete
        assert told.read_text().startswith("requeue 7\n")
        assert '"state": "interrupted"' in told.read_text()


@pytest.mark.parametrize(
    ("ranks", "again", "seconds", "why"),
    [
        (SINGLE, False, 4, "it had not ended after 4 s"),
        (DDP, True, 600, "a second signal"),
    ],
)
def test_a_run_that_does_not_end_is_ended(environment, ranks, again, seconds, why):
    words = [*ranks, *LONG, *faulty("hang", rank=0), f"shutdown.timeout={seconds}"]
    with started(environment, words) as run:
        run.wait_for((run.home / "outputs" / "struck").exists)
        run.process.terminate()
        if again:
            wait_for(lambda: run.process.poll() is not None or run.process.terminate())
        run.ends(143)
        assert (run.status["state"], run.status["exit_code"]) == ("interrupted", 143)
        assert run.status["error"].endswith(why)


def test_an_error_after_a_signal_is_no_stop(environment):
    words = [*SINGLE, *LONG, *faulty("late", rank=0), "shutdown.timeout=120"]
    with started(environment, words) as run:
        run.wait_for((run.home / "outputs" / "struck").exists)
        run.process.terminate()
        run.ends(1)
        assert (run.status["state"], run.status["exit_code"]) == ("failed", 1)
        assert run.status["error"].endswith("RuntimeError: planted fault")


def test_an_ignored_signal_remains_ignored(environment):
    with started(environment, [*DDP, *LONG], ignored=[signal.SIGHUP]) as run:
        run.wait_for_rows(5)
        os.killpg(run.process.pid, signal.SIGHUP)
        run.wait_for_rows(len(rows_of(run.folder)) + 20)
        run.process.terminate()
        run.ends(143)


@pytest.mark.parametrize(
    ("ranks", "number", "at"),
    [
        (SINGLE, signal.SIGTERM, "the first import"),
        (DDP, signal.SIGINT, "torch"),
        (DDP, signal.SIGHUP, "data"),
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


def test_a_run_that_only_skips_steps_fails(environment):
    words = [*DDP, "optimizer.lr=1e6", "clip=value", "clip.max_skips=12", "log.flush=1"]
    with started(environment, [*words, "train.max_duration=120ba"]) as run:
        run.ends(1)
        assert (run.status["state"], run.status["exit_code"]) == ("failed", 1)
        assert run.status["step"] < 120
        assert rows_of(run.folder)[-1]["grad/nonfinite"] == 12
        for text in (run.printed, (run.folder / "runner.log").read_text()):
            assert text.count(" was skipped: the gradient's norm is") == 1
            for part in ("parameters, from ", "Its samples: ", "12 steps in"):
                assert part in text


@pytest.mark.parametrize("fault", ["kill", pytest.param("hang", marks=slow)])
def test_a_rank_of_torchrun_that_is_lost_is_named(environment, fault):
    words = ["plugin=ddp", *LONG, *faulty(fault), "tracker=none", "shutdown.timeout=4"]
    words += ["launch.timeout=15"] if fault == "hang" else []
    with started(environment, words, TORCHRUN) as run:
        run.wait_for((run.home / "outputs" / "struck").exists)
        assert run.process.wait(120) == 1, run.printed
        assert (run.status["state"], run.status["rank"]) == ("failed", 1)
        assert LOST in run.status["error"].splitlines()[-1]
        assert LOST in run.printed
        run.leaves_nothing()
