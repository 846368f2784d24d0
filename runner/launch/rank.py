"""Train as one of several ranks: a local one, or one that torchrun or Slurm started.

A rank needs the configuration, the folder of the run, and its environment. The fork server of local
ranks preloads this module, torch included.
"""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from runner.config import secrets
from runner.config.cores import cores
from runner.config.environment import started_rank
from runner.config.problem import Stopped
from runner.config.schema import RunConfig
from runner.launch import peers, signals
from runner.launch.allocator import keep_freed_memory
from runner.launch.failure import described, may_be_lost_peer, stopped_by
from runner.launch.local_rank import LATER, Report, Seat
from runner.launch.local_ranks import Work
from runner.launch.process_group import abandon, launch_from_torch, leave
from runner.run_folder import files
from runner.run_folder.log_file import LogFile
from runner.run_folder.rows import JsonlSink
from runner.run_folder.status import end_in_place
from runner.telemetry.sinks.console import print_line
from runner.telemetry.sinks.terminal import ConsoleHandler
from runner.train import beat, build, stop
from runner.train.job import execute

LISTENING = 2.0
"""Seconds that a rank delays its exit while the first one writes the record.

torchrun ends all ranks once one has exited.
"""


def local_main(
    seat: Seat, reports: Connection, stderr: Connection, stacks: Connection, *job: Any
) -> None:
    """Train as a local rank, and report how that ended."""
    os.dup2(stderr.fileno(), 2)
    _die_with_the_launcher()
    faulthandler.register(signal.SIGUSR2, file=stacks.fileno(), all_threads=False)
    shared = mmap.mmap(seat.counts.fileno(), 8 * (seat.size + 1))
    counts = memoryview(shared).cast("q")
    _answer_signals(counts, seat.handled)
    beat.share(counts, seat.number)
    beat.beat()
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(seat.number)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(seat.size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(seat.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher serves the store
    }
    report = _report(seat.number, job)
    with suppress(OSError):  # the launcher is gone
        reports.send(report)
    sys.stdout.flush()
    sys.stderr.flush()
    if report[0] != "finished":
        os._exit(1)  # leaving the process group would wait for the other ranks


def _report(number: int, job: Sequence[Any]) -> Report:
    """Train, and return how it ended."""
    try:
        return "finished", rank_main(*job)
    except BaseException as error:
        text = described(error)
        if may_be_lost_peer(error):
            return "lost", text
        if asked := stopped_by(error):
            return "stopped", asked
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            text += f"\nrank {number} exited with code {code}"
        return "failed", text


def _answer_signals(counts: Sequence[int], handled: Sequence[int]) -> None:
    """Note signals that ask to stop; end at once if the launcher does not want a checkpoint."""

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and counts[-1]:
            raise signals.Terminated(number)  # the rows that are on the device are still written
        if number in handled:
            stop.request(number)
            if not stop.is_polled():
                raise signals.Terminated(number)

    for number in signals.ASKING:
        signal.signal(number, note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.ASKING)


def rank_main(config: RunConfig, folder: Path, work: Work, known: secrets.Known) -> dict[str, Any]:
    """Train as a local rank, which the environment describes."""
    secrets.take(known)
    started = started_rank()
    assert started is not None
    torch.set_num_threads(max(1, cores() // started.local_world_size))
    keep_freed_memory(build.device_of(config.device).type)
    _log_to(folder / files.LOG, started.rank)
    launch_from_torch(seed=config.seed, verbose=False, timeout=config.launch.timeout + LATER)
    if started.rank:
        ended = work(config, [])
    else:
        with JsonlSink(folder / files.ROWS) as rows:
            ended = work(config, [rows])
    leave()
    return ended


def join(work: Work | None = None, timeout: float = 600.0) -> int:
    """Train as a rank that torchrun or Slurm started; the first rank sends the configuration."""
    folder = None
    try:
        launch_from_torch(verbose=False, timeout=timeout)
        sent: list[Any] = [None, None, None]
        dist.broadcast_object_list(sent, src=0)
        config, folder, resume = sent
        peers.meet(folder)
        signals.set_timeout(config.shutdown.timeout)
        if folder.is_dir():  # not the temporary folder of an evaluation on another machine
            _log_to(folder / files.LOG, dist.get_rank())
        keep_freed_memory(build.device_of(config.device).type)
        work = work or partial(execute, folder=folder, resume=resume)
        work(config, [])
    except Stopped as stopped:
        leave()
        return signals.exit_code(stopped.signal)
    except peers.NotShared:
        abandon()
        time.sleep(LISTENING)
        return 1
    except BaseException as error:
        abandon()
        _explain(error, timeout, folder)
        if isinstance(error, Exception):
            return 1
        raise
    leave()
    return 0


def _explain(error: BaseException, timeout: float, folder: Path | None) -> None:
    """Tell the other ranks why this one fails, and print it unless it follows from another's
    end.
    """
    started = started_rank()
    assert started is not None
    peers.tell(error, started)
    if not may_be_lost_peer(error):
        if isinstance(error, Exception):
            print_line(secrets.hide(described(error)), sys.stderr)
        return
    found = peers.find(started.world_size, timeout)
    if found is not None and found.rank == 0 and (started.rank == 1 or started.local_rank == 0):
        print_line(f"clip-runner: rank 0: {found.error.splitlines()[-1]}", sys.stderr)
        if folder is not None:
            time.sleep(peers.ENDING)  # it may still record that itself
            with suppress(OSError):
                end_in_place(folder, secrets.hide(found.error), 0, found.node)
    time.sleep(LISTENING)


def _die_with_the_launcher() -> None:
    """End this rank when the process that launched it is gone, however that went."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return
    if sys.platform == "linux":
        # The kernel kills a rank even if it is stopped or does not run Python code.
        end = launcher.sentinel
        fcntl.fcntl(end, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(end, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


def _log_to(file: Path, rank: int) -> None:
    """Log to the file of the run, with the rank; the first rank's warnings to the terminal too."""
    form = f"[%(asctime)s][%(name)s][%(levelname)s] - rank {rank}: %(message)s"
    handlers: list[logging.Handler] = [LogFile(file)]
    handlers[0].setFormatter(logging.Formatter(form))
    if rank == 0:
        handlers.append(ConsoleHandler())
        handlers[-1].setLevel(logging.WARNING)
        handlers[-1].setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
