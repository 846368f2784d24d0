"""Ranks on this machine, started by torch elastic from a fork server that has torch imported.

This process trains nothing. It follows the rows that the first rank appends to ``metrics.jsonl``,
so a rank that is killed takes none of the record with it.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.forkserver
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.schema import RunConfig
from runner.config.sizes import least_ranks
from runner.launch.failure import RankFailed
from runner.run_folder import files
from runner.run_folder.rows import follow
from runner.telemetry.sinks.sink import Sink
from runner.telemetry.sinks.terminal import is_watched

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

Work = Callable[[RunConfig, Sequence[Sink]], dict[str, Any]]
"""What a rank does with the configuration; rows go to the sinks, which the first rank has."""

ENDING = 5
"""Seconds that the other ranks have to end after one has failed, before they are killed."""


def prepare(config: RunConfig) -> None:
    """Start the fork server, if the run will need one, while this process goes on.

    It imports torch in a process of its own; ranks then start in milliseconds.
    """
    if least_ranks(config.plugin) > 1:
        multiprocessing.set_forkserver_preload(["runner.launch.rank"])
        with _ignoring_interrupts():
            multiprocessing.forkserver.ensure_running()


def train_on_local_ranks(
    config: RunConfig, folder: Path, ranks: int, shown: Sequence[Sink], work: Work | None
) -> dict[str, Any]:
    """Start ranks by torch elastic, follow the first one's rows, and wait for all.

    Raises:
        RankFailed: the first rank that failed. No rank is left behind.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from runner.launch.rank import rank_main

    multiprocessing.set_forkserver_preload(["runner.launch.rank"])
    stopped = threading.Event()
    follower = threading.Thread(
        target=_feed, args=(folder / files.ROWS, stopped, shown), name="rows"
    )
    follower.start()
    try:
        with tempfile.TemporaryDirectory(prefix="clip-runner-") as logs, _quiet_elastic():
            launch = elastic_launch(_launch_config(ranks, logs), rank_main)
            try:
                summaries: dict[int, dict[str, Any]] = launch(config, folder, work)
            except ChildFailedError as error:
                rank, failed = error.get_first_failure()
                raise RankFailed(rank, _rank_error(failed, Path(logs))) from None
    finally:
        stopped.set()
        follower.join()
    return summaries[0]


def _launch_config(ranks: int, logs: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        # What ranks print on stderr is shown, and kept for those that die without a traceback.
        logs_specs=DefaultLogsSpecs(log_dir=logs, tee=Std.ERR),
        # On a terminal such a line takes the place of the bar.
        log_line_prefix_template=("\r\x1b[K" if is_watched(sys.stderr) else "") + "rank ${rank}: ",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        shutdown_timeout=ENDING,
    )


def _rank_error(failed: ProcessFailure, logs: Path) -> str:
    """Return a rank's traceback; where it left none, what it printed and how it ended."""
    message: Any = failed.message  # torch declares it as text
    if isinstance(message, dict):
        words = message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
        return str(words).strip()
    printed: list[str] = []
    for file in logs.glob(f"*/attempt_*/{failed.local_rank}/stderr.log"):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        printed = [line for line in lines if line.strip()][-20:]
    if failed.exitcode < 0:
        end = str(message).strip()  # the signal
    elif printed:
        end = f"it exited with code {failed.exitcode} and printed last: {printed[-1].strip()}"
    else:
        end = f"it exited with code {failed.exitcode} and printed nothing"
    return "\n".join([*printed, end])


def _feed(file: Path, stopped: threading.Event, sinks: Sequence[Sink]) -> None:
    for row in follow(file, stopped):
        for sink in sinks:
            sink.write(row)


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Let processes that are started inside ignore Ctrl-C: this one ends them by SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Silence torch elastic's own report of a failure: ours is shorter, and in the record."""
    about = ("torch.distributed", "torch.multiprocessing")
    known = [name for name in logging.root.manager.loggerDict if name.startswith(about)]
    loggers = [logging.getLogger(name) for name in known]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
