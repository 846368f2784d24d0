"""Train as one of several ranks: a local one, or one that torchrun or Slurm started.

A rank needs the configuration, the folder of the run, and its environment. The fork server of local
ranks preloads this module, torch included.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.config.environment import started_rank
from runner.config.schema import RunConfig
from runner.launch.local_ranks import Work
from runner.launch.process_group import launch_from_torch, leave
from runner.run_folder import files
from runner.run_folder.rows import JsonlSink
from runner.telemetry.sinks.terminal import ConsoleHandler
from runner.train.job import execute

PATIENCE = 5.0
"""Seconds that a rank which lost its peers waits to be ended, so that theirs is the first failure.

The launcher ends it at once when it has seen the peer fail."""

COLLECTIVE = ("torch.distributed.", "torch.autograd.graph")
"""Modules of torch that a lost connection is raised in: by a collective, or in a backward pass."""


def rank_main(config: RunConfig, folder: Path, work: Work) -> dict[str, Any]:
    """Train as a local rank, which the environment describes.

    Args:
        config: the configuration.
        folder: folder of the run; the first rank writes its rows there.
        work: what to do.

    Returns:
        What the work returned: the summary of a run.
    """
    _die_with_the_launcher()
    # A rank that the launcher terminates still writes the rows that are on the device.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    started = started_rank()
    assert started is not None
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // started.local_world_size))
    _log_to(folder / files.LOG, started.rank)
    try:
        launch_from_torch(seed=config.seed, verbose=False, timeout=config.launch.timeout)
        sinks = [JsonlSink(folder / files.ROWS)] if started.rank == 0 else []
        return work(config, sinks)
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:
            raise
        # torch elastic records an exception, and of an exit at most its code; it takes 0 for
        # success, and waits for ever for a result after None.
        raise RuntimeError(f"sys.exit({end.code!r}) was called") from end
    except Exception as error:
        if _may_have_lost_a_peer(error):
            time.sleep(PATIENCE)
        raise
    finally:
        leave()


def _may_have_lost_a_peer(error: Exception) -> bool:
    """Return whether ``error`` may be the end of a connection to another rank.

    It is a RuntimeError then, of any text: gloo, NCCL and the kernel each have their own.
    """
    frames = traceback.walk_tb(error.__traceback__)
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in frames)
    return isinstance(error, RuntimeError) and any(one.startswith(COLLECTIVE) for one in modules)


def join(work: Work | None = None) -> int:
    """Train as a rank that torchrun or Slurm started; the first rank sends the configuration.

    Args:
        work: what to do; the training of a run by default.

    Returns:
        The exit code.
    """
    try:
        launch_from_torch(verbose=False)
        sent: list[Any] = [None, None, None]
        dist.broadcast_object_list(sent, src=0)
        config, folder, resume = sent
        if folder.is_dir():  # not on another machine without a shared disk
            _log_to(folder / files.LOG, dist.get_rank())
        work = work or partial(execute, folder=folder, resume=resume)
        work(config, [])
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        leave()
    return 0


def _die_with_the_launcher() -> None:
    """End this rank when the process that launched it is gone, however that went."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def watch() -> None:
        wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


def _log_to(file: Path, rank: int) -> None:
    """Log to the file of the run, with the rank; the first rank's warnings to the terminal too."""
    form = f"[%(asctime)s][%(name)s][%(levelname)s] - rank {rank}: %(message)s"
    handlers: list[logging.Handler] = [logging.FileHandler(file)]
    handlers[0].setFormatter(logging.Formatter(form))
    if rank == 0:
        handlers.append(ConsoleHandler())
        handlers[-1].setLevel(logging.WARNING)
        handlers[-1].setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)
