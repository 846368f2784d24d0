"""Train as one of several ranks, which this program or torchrun started."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from runner.config.environment import started_rank, variable
from runner.config.masking import remember
from runner.config.ordinary import show_path
from runner.config.problem import RefusedOnAllRanks
from runner.config.schema import RunConfig
from runner.launch import reports, signals
from runner.launch.failure import described, is_lost_peer, stopped_by, summary_of
from runner.launch.process_group import (
    LATER,
    abandon,
    keep_freed_memory,
    launch_from_torch,
    leave,
)
from runner.launch.reports import Reports
from runner.launch.resume import newest
from runner.run_folder import files
from runner.run_folder.strict_json import JsonlSink, cut
from runner.telemetry.sinks import Sink
from runner.telemetry.sinks.console import ConsoleHandler, LogFile, MaskedFormatter, print_line
from runner.train import build, stop
from runner.train.run import execute

Work = Callable[[RunConfig, Sequence[Sink]], dict[str, Any]]  # sinks on rank 0 alone
PATIENCE = 2.0  # seconds by which a rank that lost a connection ends after the one to blame


@dataclass(frozen=True)
class Task:
    """What the ranks of a run have to do; without ``work`` they train in its folder.

    Local ranks report to the process that started them, by the ``port`` of its store.
    """

    config: RunConfig
    folder: Path
    work: Work | None = None
    resume: Path | None = None
    step: int = 0
    handled: tuple[int, ...] = ()
    port: int | None = None
    secrets: tuple[str, ...] = ()  # not to be written by any rank


def local_main(task: Task) -> dict[str, Any]:
    """Train as a rank that this program has started, and report how that ends."""
    remember(task.secrets)
    threading.Thread(target=_end_with_launcher, daemon=True, name="launcher").start()
    started = started_rank()
    assert started is not None
    assert task.port is not None
    reported = Reports.at(task.port)
    reported.begin(started.rank)
    _answer_signals(task, reported)
    torch.set_num_threads(max(1, _usable_cores() // started.local_world_size))
    _log_to(task.folder / files.LOG, started.rank)
    try:
        with _reporting_exits(reported):
            return train_as_rank(task, task.config.launch.timeout, reported, seed=task.config.seed)
    except BaseException as error:
        abandon()
        number = stopped_by(error)
        if number:
            reported.fail(error)  # a peer that was lost, perhaps
            sys.stdout.flush()
            os._exit(signals.exit_code(number))  # a rank that returns would wait for the agent
        reported.fail(error)
        until = time.monotonic() + PATIENCE
        while is_lost_peer(error) and time.monotonic() < until and not stop.requested():
            time.sleep(0.05)
        raise SystemExit(1) from None  # the report has the reason; torch would write it to a disk


def _usable_cores() -> int:
    """Return the number of cores that the ranks of this machine may share."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(cores, variable("SLURM_CPUS_ON_NODE") or cores)


def join(work: Work | None = None, timeout: float = 600.0) -> int:
    """Train as a rank that torchrun or Slurm started; the first rank sends what to do."""
    reported = Reports()
    try:
        train_as_rank(None, timeout, reported)
        return 0
    except stop.Stopped as stopped:
        leave()
        return signals.exit_code(stopped.signal)
    except RefusedOnAllRanks:
        leave()
        raise
    except BaseException as error:
        abandon()
        if isinstance(error, Exception) and not is_lost_peer(error):
            started = started_rank()
            rank = "" if started is None else f"rank {started.rank}: "
            # The record has the traceback, unless this rank failed before it met the others.
            text = summary_of(error) if reported.has_failed else described(error)
            print_line(f"clip-runner: {rank}{text}", sys.stderr)
        time.sleep(PATIENCE)  # torchrun ends all ranks then; the first one records this end
        if isinstance(error, Exception):
            return 1
        raise


def train_as_rank(
    task: Task | None,
    timeout: float,
    reported: Reports,
    shown: Sequence[Sink] = (),
    seed: int = 1024,
) -> dict[str, Any]:
    """Join the other ranks, and do what the first one, which alone has to know ``task``, says."""
    started = started_rank()
    assert started is not None
    if dist.is_initialized():  # the requests of the ranks were compared
        torch.manual_seed(seed)
    else:
        launch_from_torch(seed=seed, verbose=False, timeout=timeout + LATER)
    restarted = variable("TORCHELASTIC_RESTART_COUNT")
    if task is not None and task.port is not None and started.rank == 0 and restarted:
        again = newest(task.folder)  # an attempt failed, and torch's agent starts all ranks again
        cut(task.folder / files.ROWS, again.step if again.checkpoint else task.step)
        task = replace(task, resume=again.checkpoint or task.resume)
    sent: list[Any] = [task]
    dist.broadcast_object_list(sent, src=0)
    [task] = sent
    if isinstance(task, RefusedOnAllRanks):  # where the first rank looked: the folder of the run
        raise task
    assert task is not None
    remember(task.secrets)
    show_path(task.folder)
    reported.begin(started.rank)
    reports.watch(task.folder, started.rank, timeout)
    if not logging.root.handlers:
        _log_to(task.folder / files.LOG, started.rank)
    signals.set_timeout(task.config.shutdown.timeout)
    try:
        ended = perform(task, None if started.rank else shown)
    except BaseException as error:
        reported.fail(error)
        raise
    leave()
    return ended


def perform(task: Task, shown: Sequence[Sink] | None) -> dict[str, Any]:
    """Do what a task asks for on this rank; ``shown`` is None on a rank without sinks."""
    keep_freed_memory(build.device_of(task.config.device).type)
    work = task.work or partial(execute, folder=task.folder, resume=task.resume)
    if shown is None:
        return work(task.config, [])
    with JsonlSink(task.folder / files.ROWS) as rows:
        return work(task.config, [rows, *shown])


def _answer_signals(task: Task, reported: Reports) -> None:
    def note(number: int, frame: FrameType | None) -> None:
        if number not in task.handled and number != signal.SIGTERM:  # by which the agent ends ranks
            return
        stop.request(number)
        if not stop.is_deferred():
            raise signals.Terminated(number)
        threading.Thread(target=reported.end_after_failure, daemon=True).start()

    for number in signals.ASKING:
        signal.signal(number, note)
    signals.answered_otherwise()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.ASKING)


@contextmanager
def _reporting_exits(reported: Reports) -> Iterator[None]:
    """Let ``os._exit(0)`` of a user's code be the failure of this rank.

    Otherwise torch's agent would wait for ever for what the rank returns.
    """
    leave_process = os._exit
    rank = os.getpid()

    def leave_rank(status: int) -> NoReturn:
        if status == 0 and os.getpid() == rank:  # and not a process that this one has forked
            caller = sys._getframe(1)
            place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            reported.fail(RuntimeError(f"{place} called os._exit(0) before the training ended"))
            status = 1
        leave_process(status)

    os._exit = leave_rank
    try:
        yield
    finally:
        os._exit = leave_process


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    wait([launcher.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _log_to(file: Path, rank: int) -> None:
    # An evaluation on another machine has a temporary folder there.
    has_folder = file.parent.is_dir()
    handlers: list[logging.Handler] = [LogFile(file) if has_folder else logging.NullHandler()]
    form = f"[%(asctime)s][%(name)s][%(levelname)s] - rank {rank}: %(message)s"
    handlers[0].setFormatter(MaskedFormatter(form))
    if rank == 0:
        handlers.append(ConsoleHandler())
        handlers[-1].setLevel(logging.WARNING)
    logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
