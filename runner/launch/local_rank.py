"""One local rank, as the process that launched it sees it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from runner.launch.failure import KNOBS
from runner.telemetry.sinks.console import print_line
from runner.telemetry.sinks.terminal import is_watched

KEPT = 20
"""Last lines that a rank printed on stderr, to be recorded if it dies without a traceback."""

LATER = 5.0
"""Seconds by which the limit of a collective is later than ``launch.timeout``, after which the
launcher looks which rank hangs."""

Report = tuple[Literal["finished", "failed", "lost", "stopped"], Any]
"""How a rank ended: its result; a traceback; a traceback that may be the end of a connection to
another rank; the number of a signal."""


@dataclass(frozen=True)
class Seat:
    """What a rank needs to find the others."""

    number: int
    size: int
    port: int
    counts: Connection
    handled: Sequence[int]


class LocalRank:
    """A process that trains as one rank."""

    def __init__(self, seat: Seat, job: tuple[Any, ...]) -> None:
        from runner.launch.rank import local_main

        self.number = seat.number
        self.state: str = "running"
        self.result: Any = None
        self.ended = 0.0
        context = multiprocessing.get_context("forkserver")
        self._reports, reports = context.Pipe(duplex=False)
        self._stacks, stacks = context.Pipe(duplex=False)
        printed, stderr = context.Pipe(duplex=False)
        self._process = context.Process(
            target=local_main,
            args=(seat, reports, stderr, stacks, *job),
            name=f"rank {seat.number}",
            daemon=False,
        )
        self._process.start()
        for end in (reports, stacks, stderr):
            end.close()
        self._printed: deque[str] = deque(maxlen=KEPT)
        self._printer = threading.Thread(
            target=self._print, args=(printed,), daemon=True, name=f"stderr of rank {seat.number}"
        )
        self._printer.start()

    @property
    def runs(self) -> bool:
        """Whether the rank has neither reported its end nor died."""
        return self.state == "running"

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def waited(self) -> list[Any]:
        """What :func:`multiprocessing.connection.wait` takes to wait for news of the rank."""
        return [self._reports, self._process.sentinel]

    def look(self) -> None:
        """Read the rank's report, or notice that it died without one."""
        died = not self._process.is_alive()  # asked first: its report is in the pipe by then
        try:
            if self._reports.poll():
                self.state, self.result = self._reports.recv()
        except (EOFError, OSError):
            self._process.join(1)
            died = not self._process.is_alive()
        if self.runs and died:
            # NCCL aborts a rank whose collective takes too long, whichever rank is to blame.
            self.state = "lost" if self._process.exitcode == -signal.SIGABRT else "failed"
        if not self.runs:
            self.ended = time.monotonic()

    def error(self) -> str:
        """Return the traceback of the rank; without one, its last lines and how it ended."""
        if self.result is not None:
            return str(self.result)
        self._printer.join(1)
        code = self._process.exitcode or 0
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            end = f"rank {self.number} was ended by {name}"
            if -code == signal.SIGKILL:
                end += f", as the system does if it runs {KNOBS}"
        else:
            last = f"last: {self._printed[-1]}" if self._printed else "nothing"
            end = f"rank {self.number} exited with code {code}; it printed {last}"
        return "\n".join([*self._printed, end])

    def stack(self, seconds: float) -> list[str]:
        """Return where the rank's main thread is, a line a call, the innermost first."""
        while self._stacks.poll():
            os.read(self._stacks.fileno(), 65536)
        self.send(signal.SIGUSR2)
        text, until = "", time.monotonic() + seconds
        with suppress(OSError):
            while self._stacks.poll(max(0.0, until - time.monotonic())):
                read = os.read(self._stacks.fileno(), 65536).decode(errors="replace")
                if not read:
                    break
                text, until = text + read, time.monotonic() + 0.1
        return [line.strip() for line in text.splitlines() if line.startswith("  File ")]

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def join(self, seconds: float) -> None:
        """Wait until the process has ended."""
        self._process.join(seconds)

    def close(self) -> None:
        """Wait for a process that was killed, and for what it printed."""
        self._process.join(1)
        self._printer.join(1)
        self._reports.close()
        self._stacks.close()

    def _print(self, printed: Connection) -> None:
        # On a terminal such a line takes the place of the bar.
        prefix = ("\r\x1b[K" if is_watched(sys.stderr) else "") + f"rank {self.number}: "
        with printed, open(printed.fileno(), errors="replace", closefd=False) as lines:
            for line in lines:
                if line.strip():
                    self._printed.append(line.strip())
                print_line(prefix + line.rstrip("\n"), sys.stderr)
