"""Ranks on this machine: processes of a fork server that has torch imported.

This process trains nothing. It follows the rows that the first rank appends to ``metrics.jsonl``,
so a rank that is killed takes none of the record with it. Nothing that is shared with the ranks has
a name in the file system, so a launcher that is killed leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from runner.config.problem import Stopped
from runner.config.schema import RunConfig
from runner.config.secrets import known
from runner.config.sizes import least_ranks
from runner.launch import fork_server, hang, preload, signals
from runner.launch.failure import RankFailed
from runner.launch.local_rank import LocalRank, Seat
from runner.run_folder import files
from runner.run_folder.rows import follow
from runner.telemetry.sinks.sink import Sink
from runner.train import stop

Work = Callable[[RunConfig, Sequence[Sink]], dict[str, Any]]
"""Function that a rank runs: it takes the configuration and the sinks (none but on rank 0)."""

POLL = 0.1
"""Seconds between two looks at a request to stop."""

AGAIN = 5.0
"""Seconds until the next look for a rank that hangs, after one that found none."""

PATIENCE = 2.0
"""Seconds in which the cause is looked for after a rank lost a connection to another one."""

ENDING = 4.0
"""Seconds that the other ranks have to end after one has failed, before they are killed."""


def prepare(*configs: RunConfig) -> None:
    """Start the fork server in the background, if one of these runs has local ranks."""
    if needy := [
        config for config in configs if least_ranks(config.plugin) > 1 or config.launch.max_restarts
    ]:
        with _unasked():
            fork_server.ensure_running(preload.modules(needy))


def train_on_local_ranks(
    config: RunConfig, folder: Path, ranks: int, shown: Sequence[Sink], work: Work
) -> dict[str, Any]:
    """Start ranks, show the rows of the first rank, and wait for all ranks."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    stop.requested()  # from here on a signal is noted, and passed on to the ranks
    ended = threading.Event()
    file = folder / files.ROWS
    rows = (file, ended, shown, file.stat().st_size if file.exists() else 0)
    follower = threading.Thread(target=_feed, args=rows, name="rows")
    follower.start()
    try:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = (config, folder, work, known())
        with _Ranks(ranks, store.port, config.launch.timeout, job) as started:
            return started.wait()
    finally:
        ended.set()
        follower.join()


class _Ranks:
    """All local ranks of one run."""

    def __init__(self, size: int, port: int, timeout: float, job: tuple[Any, ...]) -> None:
        self._open = ExitStack()
        memory = self._open.enter_context(_unnamed(8 * (size + 1)))
        # One count of each rank, and whether they are to end without a checkpoint.
        self._shared = mmap.mmap(memory.fileno(), 8 * (size + 1))
        self._counts = memoryview(self._shared).cast("q")
        self._timeout = timeout
        self._changed, self._sum = time.monotonic(), 0
        self._lost: float | None = None
        self._passed_on = False
        with _unasked():
            fork_server.ensure_running(preload.modules([job[0]]))
            self._ranks = [
                LocalRank(Seat(number, size, port, memory, signals.handled()), job)
                for number in range(size)
            ]

    def __enter__(self) -> _Ranks:
        self._open.enter_context(signals.last_words(lambda code, why: self._kill()))
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._counts.release()
        self._shared.close()
        self._open.close()

    def wait(self) -> dict[str, Any]:
        """Wait until every rank has finished, and return the result of the first one."""
        while True:
            self._collect()
            if all(rank.state == "finished" for rank in self._ranks):
                summary: dict[str, Any] = self._ranks[0].result
                return summary
            if number := stop.requested():
                self._pass_on(number)
            failed = [rank for rank in self._ranks if rank.state == "failed"]
            if first := min(failed, key=lambda rank: rank.ended, default=None):
                raise RankFailed(first.number, first.error())
            stopped = [rank.result for rank in self._ranks if rank.state == "stopped"]
            # Ranks that were stopped before they trained leave others in a collective.
            if stopped and (self._lost or not any(rank.runs for rank in self._ranks)):
                raise Stopped(stopped[0])
            if found := self._hanging():
                raise RankFailed(*found)

    def _collect(self) -> None:
        """Wait for news of the ranks, at most ``POLL`` seconds."""
        running = [rank for rank in self._ranks if rank.runs]
        wait([waited for rank in running for waited in rank.waited], POLL)
        for rank in running:
            rank.look()
            if rank.state == "lost" and self._lost is None:
                self._lost = time.monotonic()
        if (total := sum(self._counts[:-1])) != self._sum:
            self._changed, self._sum = time.monotonic(), total

    def _pass_on(self, number: int) -> None:
        """Ask the ranks to stop, or end them where no rank trains yet."""
        if max(self._counts[:-1]) < hang.TRAINS:
            raise Stopped(number)
        if not self._passed_on:
            self._passed_on = True
            for rank in self._ranks:
                rank.send(number)

    def _hanging(self) -> tuple[int, str] | None:
        """Return the rank for which the others wait, and where it is; None if none hangs."""
        now, counts = time.monotonic(), list(self._counts[:-1])
        running = [rank for rank in self._ranks if rank.runs]
        if self._lost is not None and now - self._lost > PATIENCE:
            if found := hang.behind(running, counts, self._timeout):
                return found
            lost = [rank for rank in self._ranks if rank.state == "lost"]
            first = min(lost, key=lambda rank: rank.ended)
            return first.number, first.error()
        trains = min((counts[rank.number] for rank in running), default=0) >= hang.TRAINS
        if self._lost is None and trains and now - self._changed > self._timeout:
            self._changed = now - self._timeout + AGAIN  # several may compute for long
            return hang.waited_for(running, counts, self._timeout)
        return None

    def _end(self) -> None:
        """End the ranks that still run; they write their last rows, but no checkpoint."""
        self._counts[-1] = 1
        for rank in self._ranks:
            if rank.runs:
                rank.send(signal.SIGKILL if hang.is_stopped(rank.pid) else signal.SIGTERM)
        until = time.monotonic() + ENDING
        for rank in self._ranks:
            rank.join(max(0.0, until - time.monotonic()))
        self._kill()
        for rank in self._ranks:
            rank.close()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.send(signal.SIGKILL)


def _feed(file: Path, stopped: threading.Event, sinks: Sequence[Sink], earlier: int) -> None:
    for row in follow(file, stopped, start=earlier):
        for sink in sinks:
            sink.write(row)


@contextmanager
def _unnamed(size: int) -> Iterator[Connection]:
    """Yield memory that other processes can map, as a connection: these can be sent to ranks."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("clip-runner")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    with Connection(descriptor) as memory:
        yield memory


@contextmanager
def _unasked() -> Iterator[None]:
    """Start processes in this block that no signal reaches, until they unblock it."""
    resource_tracker.ensure_running()  # it would unblock some of them
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
