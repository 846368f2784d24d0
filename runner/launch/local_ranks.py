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
"""Function that a rank runs: it takes the configuration and the sinks (none but on rank 0)."""

ENDING = 5
"""Seconds that the other ranks have to end after one has failed, before they are killed."""


def prepare(config: RunConfig) -> None:
    """Start the fork server in the background, if the run has several local ranks.

    The server imports torch in its own process; ranks then start in milliseconds.
    """
    if least_ranks(config.plugin) > 1:
        multiprocessing.set_forkserver_preload(["runner.launch.rank"])
        with _ignoring_interrupts():
            multiprocessing.forkserver.ensure_running()


def train_on_local_ranks(
    config: RunConfig, folder: Path, ranks: int, shown: Sequence[Sink], work: Work
) -> dict[str, Any]:
    """Start ranks by torch elastic, show the rows of the first rank, and wait for all ranks.

    Raises:
        RankFailed: a rank failed; it names the first one. All ranks have ended by then.
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
    """Return the traceback of a rank; without one, its last lines and how it ended."""
    message: Any = failed.message  # torch declares it as text
    if isinstance(message, dict):
        text = message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
        return str(text).strip()
    printed: list[str] = []
    for file in logs.glob(f"*/attempt_*/{failed.local_rank}/stderr.log"):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        printed = [line for line in lines if line.strip()][-20:]
    if failed.exitcode < 0:
        end = str(message).strip()  # the signal
    else:
        last = f"last: {printed[-1].strip()}" if printed else "nothing"
        end = f"it exited with code {failed.exitcode} and printed {last}"
    return "\n".join([*printed, end])


def _feed(file: Path, stopped: threading.Event, sinks: Sequence[Sink]) -> None:
    for row in follow(file, stopped):
        for sink in sinks:
            sink.write(row)


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Make processes that are started in this block ignore Ctrl-C; they are ended by SIGTERM."""
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
    """Silence torch elastic's report of a failure, because ours is shorter and is recorded."""
    about = ("torch.distributed", "torch.multiprocessing")
    known = [name for name in logging.root.manager.loggerDict if name.startswith(about)]
    before = {logging.getLogger(name): logging.getLogger(name).disabled for name in known}
    for logger in before:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in before.items():
            logger.disabled = disabled
