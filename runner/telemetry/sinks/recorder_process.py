"""Start the process that records runs with wandb: for one run, ahead of it, or for a whole sweep.

The process takes about a second to import wandb and to start wandb's client. One that is begun
ahead does so while this process imports torch; one that is kept does so once for all its runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress

from runner.telemetry.sinks import wandb_process

_READ_BY_WANDB = re.compile(r"WANDB_|NETRC|PROXY|SSL|CERT|_CA_|HOME$|^XDG_|^TE?MP", re.IGNORECASE)
"""Environment variables that wandb and its client read when they start."""


class RecorderProcess(subprocess.Popen[str]):
    """A process that records one run after the other, see :mod:`wandb_process`."""

    def __init__(self) -> None:
        self._begun_with = _surroundings()
        # The client of another wandb in this process must not be shared: it may be killed.
        environ = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
        # Error reports would be sent to wandb even if the run is recorded offline.
        environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # Folders that wandb makes when it is imported: a process that is killed cannot remove them.
        self._scratch = tempfile.mkdtemp(prefix="clip-runner-")
        super().__init__(
            [
                *(sys.executable, "-P", "-W", "ignore"),
                *(wandb_process.__file__, self._scratch, str(os.getpid())),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
            encoding="utf-8",
            start_new_session=True,  # an interrupt at the terminal is for the trainer
        )

    @property
    def fits(self) -> bool:
        """Whether it runs, and a process that is started now would record in the same way."""
        return self.poll() is None and self._begun_with == _surroundings()

    def end(self) -> None:
        """Let it end by itself, which is not waited for; it records nothing more."""
        for stream in (self.stdin, self.stdout):
            assert stream is not None
            with suppress(OSError):  # it ended before it read its input
                stream.close()
        threading.Thread(target=self._clear, daemon=True, name="end of wandb").start()

    def give_up(self) -> None:
        """Kill it, and remove what it has left."""
        self.kill()
        self._clear()

    def _clear(self) -> None:
        self.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


_kept: list[RecorderProcess] = []
"""At most one process, which waits for its next run."""


def begin() -> None:
    """Start the process of the next run now, so that it is ready when that run begins."""
    with suppress(OSError):  # the run itself logs that wandb cannot be started
        keep(take())


def take() -> RecorderProcess:
    """Return a process for a run: the one that was begun ahead or kept, or else a new one."""
    while _kept:
        process = _kept.pop()
        if process.fits:
            return process
        process.end()
    return RecorderProcess()


def keep(process: RecorderProcess) -> None:
    """Keep a process for the next run."""
    end_kept()
    _kept.append(process)


def end_kept() -> None:
    """Let the process end that is kept, if any: no run follows."""
    while _kept:
        _kept.pop().end()


def _surroundings() -> dict[str, str]:
    """Return the variables that wandb reads, and the working folder, where it looks for files."""
    read = {key: value for key, value in os.environ.items() if _READ_BY_WANDB.search(key)}
    read.pop("WANDB_SERVICE", None)
    with suppress(OSError):  # the folder was removed
        read[""] = os.getcwd()
    return read
