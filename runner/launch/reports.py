"""What ranks report to the process that keeps the record: that they run, and how they failed.

Reports travel by a store of ``torch.distributed``, not by files: a full disk, or a disk that
machines do not share, cannot lose them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from runner.config.environment import started_nodes
from runner.launch.failure import Failure, described, is_lost_peer, stopped_by, summary_of
from runner.launch.rendezvous import HOST, served_store
from runner.run_folder import files
from runner.train import stop

PATIENCE = 3.0  # seconds in which ranks report how they ended, after one lost a connection
LONGEST = 200_000  # characters of a traceback in a report
_CONNECT = timedelta(seconds=10)  # to reach a store, whose process may be gone
_PREFIX = "clip-runner"


class Reports:
    """The reports of all ranks, in a store.

    ``store`` belongs to the process that starts local ranks, or is a connection to it. By default
    it is the store that torchrun's ranks have in common.
    """

    def __init__(self, store: TCPStore | None = None) -> None:
        self._store = store
        self._rank = 0
        self.has_failed = False  # whether this rank has reported how it failed

    @classmethod
    def served(cls) -> Reports:
        """Return reports that other processes of this machine can reach by :attr:`port`."""
        return cls(served_store())

    @classmethod
    def at(cls, port: int) -> Reports:
        return cls(_connected(HOST, port))

    @property
    def port(self) -> int:
        return int(self.store.port)

    @property
    def store(self) -> TCPStore:
        if self._store is None:  # the first rank serves it, or torchrun
            self._store = _connected(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return self._store

    def begin(self, rank: int) -> None:
        """Report that this rank runs."""
        self._rank = rank
        self._write()

    def fail(self, error: BaseException) -> None:
        """Report how this rank failed; only the first call counts. A stop is no failure."""
        if self.has_failed:
            return
        lost = is_lost_peer(error)
        if not lost and stopped_by(error):
            return
        self.has_failed = True
        with suppress(RuntimeError):  # the process that serves the store is gone
            number = self.store.add(f"{_PREFIX}/failures", 1)
            self._write(
                error=described(error)[-LONGEST:],
                summary=summary_of(error),
                lost=lost,
                number=number,
            )

    def end_after_failure(self) -> None:
        """End this process, which was asked to end, soon after a rank failed."""
        with suppress(RuntimeError):
            while not self.store.check([f"{_PREFIX}/failures"]):
                time.sleep(0.2)
        time.sleep(PATIENCE)
        os._exit(1)

    def blamed(self, folder: Path, size: int, timeout: float) -> Failure:
        """Return why the ranks ended, of which one at least ended by an exception.

        That is the first exception which is no lost connection. A rank that reported nothing hangs
        or was killed.
        """
        until = time.monotonic() + PATIENCE
        while True:
            failure = self.raised(size)
            if failure is not None:
                return failure
            reports = self._read(size)
            ended = _by_time(reports)
            silent = [rank for rank in range(size) if rank not in ended]
            if not silent or time.monotonic() > until:
                break
            time.sleep(0.1)
        first = silent[0] if silent else ended[0]
        node = reports.get(first, {}).get("node")
        where = f" on {node}" if node else ""
        who = f"rank {first}{where} hangs or was killed: the others" if silent else "each rank"
        reason = f"lost the connection, or waited for more than launch.timeout={timeout:g} s"
        sentence = f"{who} {reason}"
        lines = _stacks(folder, size) if silent else [reports[first]["error"]]
        ends = tuple(_text(rank, reports[rank]) for rank in ended)
        return Failure("\n".join([*lines, sentence]), first, node, summary=sentence, others=ends)

    def raised(self, size: int) -> Failure | None:
        """Return the first exception of a rank that is no lost connection, if there is one."""
        reports = self._read(size)
        ended = _by_time(reports)
        genuine = [rank for rank in ended if not reports[rank]["lost"]]
        if not genuine:
            return None
        first = genuine[0]
        report = reports[first]
        later = tuple(_text(rank, reports[rank]) for rank in ended if rank != first)
        summary = report["summary"]
        return Failure(report["error"], first, report.get("node"), summary=summary, others=later)

    def _write(self, **entries: Any) -> None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        report = {"attempt": attempt, **entries}
        if (started_nodes() or 1) > 1:
            report["node"] = node
        with suppress(RuntimeError):
            self.store.set(f"{_PREFIX}/{self._rank}", json.dumps(report))

    def _read(self, size: int) -> dict[int, dict[str, Any]]:
        """Return the reports of the last attempt, by rank."""
        reports: dict[int, dict[str, Any]] = {}
        with suppress(RuntimeError):
            for rank in range(size):
                key = f"{_PREFIX}/{rank}"
                if self.store.check([key]):
                    reports[rank] = json.loads(self.store.get(key))
        last = max((report["attempt"] for report in reports.values()), default=0)
        return {rank: report for rank, report in reports.items() if report["attempt"] == last}


def watch(folder: Path, rank: int, seconds: float) -> None:
    """Write the stack of this rank to a file if it begins no microbatch in ``seconds``."""
    file = _stack_file(folder, rank)
    arguments = (file, seconds)
    threading.Thread(target=_watch, args=arguments, daemon=True, name="hang").start()


def _connected(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT)


def _by_time(reports: dict[int, dict[str, Any]]) -> list[int]:
    """Return the ranks that failed, in the order in which they reported it."""
    failed = [rank for rank, report in reports.items() if "error" in report]
    return sorted(failed, key=lambda rank: reports[rank]["number"])


def _text(rank: int, report: dict[str, Any]) -> str:
    return f"rank {rank}: {report['error']}"


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / files.RANKS / f"{rank}.stack"


def _watch(file: Path, seconds: float) -> None:
    seen = 0
    # The disk may be full, or an evaluation has its folder on another machine.
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        with file.open("w") as stack:
            while True:
                if stop.begun != seen:
                    seen = stop.begun
                    faulthandler.dump_traceback_later(seconds, file=stack)  # by a thread in C
                time.sleep(min(1.0, seconds / 10))


def _stacks(folder: Path, size: int) -> list[str]:
    """Return where each rank is that has left its stack in a file."""
    lines = []
    for rank in range(size):
        with suppress(OSError):
            text = _stack_file(folder, rank).read_text(encoding="utf-8")
            _, head, calls = text.rpartition("(most recent call first):\n")
            if head:
                lines += [f"where rank {rank} is {head.rstrip()}", *calls.splitlines()[:12]]
    return lines
