"""What one rank of a local run does. Preloaded by the fork server, torch included.

A rank learns all it needs from one plain dictionary and its environment.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from runner.config.check import parse
from runner.launch.local_ranks import Work
from runner.launch.process_group import launch_from_torch, leave
from runner.run_folder import files
from runner.run_folder.rows import JsonlSink
from runner.telemetry.sinks.terminal import ConsoleHandler
from runner.train.job import execute

PATIENCE = 5.0
"""Seconds that a rank which lost its peers waits to be ended, so that theirs is the first failure.

The launcher ends it at once when it has seen the peer fail."""

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")


def rank_main(
    plain: dict[str, Any],
    folder: str,
    work: Work | None = None,
) -> dict[str, Any]:
    """Train as one of the ranks that the environment describes.

    Args:
        plain: the resolved configuration.
        folder: of the run; the first rank writes its rows there.
        work: what to do; a run's training by default.

    Returns:
        What the work returned: the summary of a run.
    """
    _die_with_the_launcher()
    # Ended by the launcher, a rank still writes the rows it holds back.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    config = parse(plain)
    rank, local_ranks = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    log_to(Path(folder) / files.LOG, rank)
    try:
        launch_from_torch(seed=config.seed, verbose=False, timeout=config.launch.timeout)
        sinks = [JsonlSink(Path(folder) / files.ROWS)] if rank == 0 else []
        return (work or execute)(config, sinks)
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:
            raise
        # torch elastic records an exception, and of an exit at most its code; it takes 0 for
        # success, and waits for ever for a result after None.
        raise RuntimeError(f"sys.exit({end.code!r}) was called") from end
    except Exception as error:
        if any(sign in str(error) for sign in LOST):
            time.sleep(PATIENCE)
        raise
    finally:
        leave()


def _die_with_the_launcher() -> None:
    """End this rank when the process that launched it is gone, however that went."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def watch() -> None:
        wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


def log_to(file: Path, rank: int) -> None:
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
