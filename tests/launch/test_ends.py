"""How a run ends: by a rank that dies or hangs, by SIGKILL, or by a signal that asks it to stop."""

import os
import signal
import time

import pytest

from tests.launch.ends import started

RANKS = {
    "ddp 2": ["plugin=ddp", "plugin.nproc=2"],
    "ddp 4": ["plugin=ddp", "plugin.nproc=4"],
    "fsdp 2": ["plugin=fsdp", "plugin.nproc=2"],
    "fsdp 4": ["plugin=fsdp", "plugin.nproc=4"],
    "hybrid 2": ["plugin=hybrid", "plugin.nproc=2", "plugin.tp_size=2"],
    "hybrid 4": ["plugin=hybrid", "plugin.nproc=4", "plugin.tp_size=2"],
}
LONG = ["train.max_duration=100000ba", "log.flush=5"]
TIMEOUT = 6


def faulty(fault, rank=1, at=8):
    model = ["model._target_=tests.faulty.Faulty", f"+model.fault={fault}"]
    return [*model, f"+model.rank={rank}", f"+model.at={at}"]


def struck(run):
    return (run.home / "outputs" / "struck").stat().st_mtime


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("hang", "rank 1 hangs: it is in forward ("),
        ("loop", "rank 1 hangs: it is in forward ("),
        ("halt", "rank 1 hangs: its process is stopped (SIGSTOP)"),
    ],
)
def test_a_rank_that_hangs_is_named(environment, ranks, fault, where):
    words = [*RANKS[ranks], *LONG, *faulty(fault), f"launch.timeout={TIMEOUT}"]
    with started(environment, words) as run:
        run.wait_for((run.home / "outputs" / "struck").exists)
        assert run.process.wait(90) == 1, run.printed
        taken = time.time() - struck(run)
        status = run.status
        assert (status["state"], status["rank"]) == ("failed", 1), status["error"]
        assert where in status["error"], status["error"]
        assert where in run.printed
        assert "Traceback" not in run.printed
        assert not run.left(5)
        assert taken < TIMEOUT + 15


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "launcher"])
def test_sigkill_of_one_process_ends_all(environment, ranks, victim):
    with started(environment, [*RANKS[ranks], *LONG]) as run:
        run.wait_for_rows()
        if victim == "launcher":
            run.process.kill()
            assert not run.left(15)
            return
        number = int(victim[-1])
        at = time.monotonic()
        os.kill(run.ranks()[number], signal.SIGKILL)
        assert run.process.wait(60) == 1, run.printed
        assert time.monotonic() - at < 15
        assert (run.status["state"], run.status["rank"]) == ("failed", number)
        assert f"rank {number} was ended by SIGKILL" in run.printed
        assert "data.batch_size" in run.printed
        assert not run.left(5)
