"""How a run ends: by a rank that dies or hangs, by SIGKILL, or by a signal that asks it to stop."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.run_folder.status import state_of
from tests.launch import random_moments
from tests.launch.ends import started

RANKS = {
    "ddp 2": ["plugin=ddp", "plugin.nproc=2"],
    "ddp 4": ["plugin=ddp", "plugin.nproc=4"],
    "fsdp 2": ["plugin=fsdp", "plugin.nproc=2"],
    "fsdp 4": ["plugin=fsdp", "plugin.nproc=4"],
    "hybrid 2": ["plugin=hybrid", "plugin.nproc=2", "plugin.tp_size=2", "model=gpt", "data=text"],
    "hybrid 4": ["plugin=hybrid", "plugin.nproc=4", "plugin.tp_size=2", "model=gpt", "data=text"],
}
# The faulty model is not cut into pieces.
WHOLE = RANKS | {
    "hybrid 2": ["plugin=hybrid", "plugin.nproc=2", "plugin.zero_stage=2"],
    "hybrid 4": ["plugin=hybrid", "plugin.nproc=4", "plugin.zero_stage=3"],
}
LONG = ["train.max_duration=10000000ba", "log.flush=5"]
TIMEOUT = 6


def faulty(fault, rank=1, at=8):
    model = ["model._target_=tests.faulty.Faulty", f"+model.fault={fault}"]
    return [*model, f"+model.rank={rank}", f"+model.at={at}"]


def struck(run):
    return (run.home / "outputs" / "struck").stat().st_mtime


@pytest.mark.parametrize("ranks", WHOLE)
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("hang", "rank 1 hangs: it is in forward ("),
        ("loop", "rank 1 hangs: it is in forward ("),
        ("halt", "rank 1 hangs: its process is stopped (SIGSTOP)"),
    ],
)
@pytest.mark.slow
def test_a_rank_that_hangs_is_named(environment, ranks, fault, where):
    words = [*WHOLE[ranks], *LONG, *faulty(fault), f"launch.timeout={TIMEOUT}"]
    with started(environment, words) as run:
        run.wait_for((run.home / "outputs" / "struck").exists)
        assert run.process.wait(120) == 1, run.printed
        taken = time.time() - struck(run)
        status = run.status
        assert (status["state"], status["rank"]) == ("failed", 1), status["error"]
        assert where in status["error"], status["error"]
        assert where in run.printed
        assert "Traceback" not in run.printed
        assert not run.left()
        assert taken < TIMEOUT + 15


@pytest.mark.slow
def test_ranks_that_wait_in_different_collectives_end(environment):
    """The message says where each of them waits."""
    words = [*RANKS["ddp 2"], *LONG, *faulty("apart"), f"launch.timeout={TIMEOUT}", "tracker=none"]
    with started(environment, words) as run:
        run.wait_for((run.home / "outputs" / "struck").exists)
        assert run.process.wait(120) == 1, run.printed
        error = str(run.status["error"])
        places = r"rank 0: \w+ \(.+/runner/\S+:\d+\); rank 1: forward \(.+/tests/faulty.py:\d+\)"
        since = f"the ranks wait for each other since more than launch.timeout={TIMEOUT} s"
        assert re.fullmatch(rf"{since} \({places}\)", error), error
        assert error in run.printed
        assert not run.left()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "launcher"])
@pytest.mark.product(every=18)
def test_sigkill_of_one_process_ends_all(environment, ranks, victim):
    with started(environment, [*RANKS[ranks], *LONG]) as run:
        run.wait_for_rows()
        if victim == "launcher":
            run.process.kill()
            assert not run.left()
            return
        number = int(victim[-1])
        os.kill(run.ranks()[number], signal.SIGKILL)
        assert run.process.wait(120) == 1, run.printed
        assert (run.status["state"], run.status["rank"]) == ("failed", number)
        assert f"rank {number} was ended by SIGKILL" in run.printed
        assert "data.batch_size" in run.printed
        assert not run.left()


def test_sigkill_in_place_is_seen_from_the_record(environment):
    with started(environment, LONG) as run:
        run.wait_for_rows()
        run.process.kill()
        run.process.wait()
        assert state_of(run.status) == "killed"
        assert not run.left()


SINGLE = {"single": ["plugin=single"]}
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 143}


def rows(run):
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ranks", SINGLE | RANKS)
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.product(every=14)
def test_a_signal_ends_the_run_after_its_step(environment, ranks, number):
    with started(environment, [*(SINGLE | RANKS)[ranks], *LONG]) as run:
        run.wait_for_rows(10)
        run.process.send_signal(number)
        assert run.process.wait(120) == CODES[number], run.printed
        status = run.status
        assert (status["state"], status["exit_code"]) == ("interrupted", CODES[number])
        assert [row["train/step"] for row in rows(run)] == [*range(1, len(rows(run)) + 1)]
        assert "Traceback" not in run.printed
        assert not run.left()


@pytest.mark.parametrize("to", ["all", "rank 1"])
@pytest.mark.product(every=2)
def test_a_signal_to_ranks_stops_the_run(environment, to):
    """As a terminal and Slurm send it: to every process; or as somebody does: to one rank."""
    with started(environment, [*RANKS["ddp 2"], *LONG]) as run:
        run.wait_for_rows(5)
        if to == "all":
            os.killpg(run.process.pid, signal.SIGTERM)
        else:
            os.kill(run.ranks()[1], signal.SIGTERM)
        assert run.process.wait(120) == 143, run.printed
        assert (run.status["state"], run.status["exit_code"]) == ("interrupted", 143)
        assert "Traceback" not in run.printed


@pytest.mark.parametrize("ranks", ["single", "ddp 2"])
@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.product(every=4)
def test_a_run_that_does_not_end_is_ended(environment, ranks, signals):
    """By a second signal at once, otherwise after shutdown.timeout."""
    words = [*(SINGLE | RANKS)[ranks], *LONG, *faulty("hang", rank=0)]
    words.append(f"shutdown.timeout={4 if signals == 1 else 60}")
    with started(environment, words) as run:
        run.wait_for((run.home / "outputs" / "struck").exists)
        run.process.send_signal(signal.SIGTERM)
        if signals == 2:
            time.sleep(1.5)
            run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(120) == 143, run.printed
        assert (run.status["state"], run.status["exit_code"]) == ("interrupted", 143)
        why = "it had not ended after 4 s" if signals == 1 else "a second signal"
        assert str(run.status["error"]).endswith(why)
        assert not run.left()


@pytest.mark.slow
def test_a_wandb_that_hangs_takes_no_longer_than_the_time_to_end(environment):
    """Its process is stopped; without a signal it would be waited for longer."""
    timeout = 8
    with started(environment, [*LONG, f"shutdown.timeout={timeout}"]) as run:
        run.wait_for_rows(5)
        [recorder] = [
            pid
            for pid in run.processes()
            if "wandb_process" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        os.kill(recorder, signal.SIGSTOP)
        run.process.terminate()
        assert run.process.wait(120) == 143, run.printed
        assert "wandb did not end in time (shutdown.timeout)" in run.printed
        assert str(run.folder / "report.html") in run.printed
        assert "it had not ended" not in run.printed
        assert run.status["error"] == "terminated by SIGTERM"
        assert not run.left()


@pytest.mark.parametrize("ranks", ["single", "ddp 2"])
@pytest.mark.product(every=2)
def test_an_error_after_a_signal_is_no_stop(environment, ranks):
    words = [*(SINGLE | RANKS)[ranks], *LONG, *faulty("late", rank=int(ranks != "single"))]
    words.append("shutdown.timeout=120")
    with started(environment, words) as run:
        run.wait_for((run.home / "outputs" / "struck").exists)
        run.process.terminate()
        assert run.process.wait(120) == 1, run.printed
        status = run.status
        assert (status["state"], status["exit_code"]) == ("failed", 1)
        assert status["rank"] == int(ranks != "single")
        assert str(status["error"]).endswith("RuntimeError: planted fault")
        assert not run.left()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
@pytest.mark.product(every=2)
def test_an_ignored_signal_remains_ignored(environment, number):
    with started(environment, [*RANKS["ddp 2"], *LONG], ignored=[number]) as run:
        run.wait_for_rows(5)
        os.killpg(run.process.pid, number)
        written = len(rows(run))
        run.wait_for_rows(written + 20)
        run.process.terminate()
        assert run.process.wait(120) == 143, run.printed


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("ranks", ["single", "ddp 2"])
@pytest.mark.parametrize("at", ["the first import", "torch", "data"])
@pytest.mark.product(every=4)
def test_a_signal_before_the_training(environment, number, ranks, at):
    words = [*(SINGLE | RANKS)[ranks], *LONG, "data._target_=tests.faulty.slow_data"]
    with started(environment, words) as run:
        run.wait_for_handlers()
        if at == "torch":
            library = "libtorch_cpu"
            run.wait_for(lambda: library in Path(f"/proc/{run.process.pid}/maps").read_text())
        if at == "data":
            run.wait_for((run.home / "outputs" / "reads").exists)
        run.process.send_signal(number)
        assert run.process.wait(120) == CODES[number], run.printed
        assert "Traceback" not in run.printed
        for status in run.home.glob("outputs/runs/*/status.json"):
            assert json.loads(status.read_text())["exit_code"] == CODES[number]
        assert not run.left()


# Interrupts itself in the code of a string, as the methods of a dataclass are, at an import.
IN_A_STRING = """
import importlib.abc, runpy, sys

class AtImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {at!r}:
            exec("import os; os.kill(os.getpid(), 2)")

sys.meta_path.insert(0, AtImport())
runpy.run_module("runner", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("at", ["runner.cli.main", "runner.cli.run"])
def test_an_interrupt_in_the_code_of_a_string_keeps_its_exit_code(environment, tmp_path, at):
    (tmp_path / "in_a_string.py").write_text(IN_A_STRING.format(at=at))
    environment["PYTHONPATH"] += f":{tmp_path}"
    with started(environment, LONG, before=("-m", "in_a_string")) as run:
        assert run.process.wait(120) == 130, run.printed
        assert "Traceback" not in run.printed


# A torch whose import never ends.
SLOW_TORCH = """
import os, pathlib, sys, time

if "forkserver" in str(sys.orig_argv):
    pathlib.Path(os.environ["HOME"], "imports").touch()
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda one: one.name)
def test_nothing_is_left_of_a_run_that_ends_while_its_fork_server_imports(
    environment, tmp_path, number
):
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    with started(environment, ["plugin=ddp", "plugin.nproc=2"]) as run:
        run.wait_for((tmp_path / "imports").exists)
        run.process.send_signal(number)
        assert run.process.wait(120) == (130 if number == signal.SIGINT else -signal.SIGKILL)
        assert "Traceback" not in run.printed
        assert not run.left()


@pytest.mark.parametrize("ranks", ["single", "ddp 2"])
@pytest.mark.product(every=2)
def test_memory_that_runs_out_names_what_to_change(environment, ranks):
    words = [*(SINGLE | RANKS)[ranks], *faulty("memory", rank=0), "tracker=none"]
    with started(environment, words) as run:
        assert run.process.wait(120) == 1, run.printed
        for key in ("data.batch_size", "accumulation.steps", "plugin="):
            assert key in run.printed.splitlines()[-1] + run.printed.splitlines()[-2]
            assert key in run.status["error"]
        assert "can't allocate memory" in run.status["error"]


def test_a_sweep_is_interrupted_as_a_whole(environment):
    words = ["-m", "seed=1,2", "sweep.name=mine", *LONG, "tracker=none"]
    with started(environment, words) as run:
        run.wait_for_rows(5)
        run.process.terminate()
        assert run.process.wait(120) == 143, run.printed
        sweep = json.loads((run.home / "outputs/sweeps/mine/sweep.json").read_text())
        assert sweep["state"] == "interrupted"
        assert [one["state"] for one in sweep["runs"]] == ["interrupted", "waiting"]
        assert sweep["runs"][0]["exit_code"] == 143
        assert "Traceback" not in run.printed


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "2>&1 | head -1"])
@pytest.mark.product(every=4)
def test_a_stream_that_is_closed_changes_nothing(environment, closed):
    words = "tracker=none device=cpu train.max_duration=3ba clip.threshold=0.5"
    command = f"set -o pipefail; {sys.executable} -m runner {words} {closed}"
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (folder,) = Path(environment["RUNNER_OUTPUTS"], "runs").iterdir()
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    text = (folder / "runner.log").read_text() + (folder / "metrics.jsonl").read_text()
    assert "report.html" not in text


@pytest.mark.parametrize(("number", "asked"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
@pytest.mark.product(every=2)
def test_slurm_is_asked_to_start_a_pre_empted_job_again(environment, tmp_path, number, asked):
    """After the record is complete: Slurm ends the job that it requeues."""
    program, told = tmp_path / "bin" / "scontrol", tmp_path / "told"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" > {told}\ncat $RUNNER_OUTPUTS/runs/*/status.json >> {told}\n'
    )
    program.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "PATH": f"{program.parent}:{environment['PATH']}"}
    with started(environment | slurm, [*LONG, "tracker=none"]) as run:
        run.wait_for_rows()
        run.process.send_signal(number)
        assert run.process.wait(120) == 143, run.printed
    assert told.exists() == asked
    if asked:
        assert told.read_text().startswith("requeue 7\n")
        assert '"state": "interrupted"' in told.read_text()


@pytest.mark.parametrize("plugin", random_moments.PLUGINS)
@pytest.mark.slow
def test_runs_that_end_at_random_moments(plugin, capsys):
    """More of them: ``python -m tests.launch.random_moments``."""
    failed = random_moments.moments(3, 29, [plugin])
    assert not failed, capsys.readouterr().out


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("hang", "rank 1 hangs or was killed: the others lost the connection, or waited for more"),
        ("kill", "rank 1 hangs or was killed: the others lost the connection, or waited for more"),
        ("raise", "RuntimeError: planted fault"),
    ],
)
@pytest.mark.slow
def test_a_rank_of_torchrun_that_fails_is_named(environment, fault, why):
    words = ["plugin=ddp", *LONG, *faulty(fault), f"launch.timeout={TIMEOUT}", "tracker=none"]
    with started(environment, [*words, "shutdown.timeout=4"], TORCHRUN) as run:
        run.wait_for((run.home / "outputs" / "struck").exists)
        assert run.process.wait(120) == 1, run.printed
        status = run.status
        assert (status["state"], status["rank"]) == ("failed", 1), status["error"]
        assert why in str(status["error"]).splitlines()[-1]
        assert why in run.printed
        assert not run.left(files=False)


@pytest.mark.slow
def test_an_interrupt_of_torchrun_stops_its_ranks_after_a_checkpoint(environment):
    """Each rank gets the signal twice: from the terminal, and from torchrun."""
    with started(environment, ["plugin=ddp", *LONG, "tracker=none"], TORCHRUN) as run:
        run.wait_for_rows(5)
        os.killpg(run.process.pid, signal.SIGINT)
        run.process.wait(120)
        assert (run.status["state"], run.status["exit_code"]) == ("interrupted", 130)
        assert list((run.folder / "checkpoints").glob("step_*"))
        assert not run.left(files=False)
