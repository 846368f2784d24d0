"""What the fork server of local ranks imports: the rank, and what to do at its own end."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType

from runner.launch import signals

_LAUNCHER = "RUNNER_LAUNCHER"
"""Environment variable with the process that starts the server."""

LOOK = 0.5
"""Seconds between two looks at the launcher while torch is imported."""


def ensure_running() -> None:
    """Start the server, unless it runs: a process that imports torch, and then forks ranks."""
    multiprocessing.set_forkserver_preload([__name__])
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[_LAUNCHER]


def _import_rank(launcher: int) -> None:
    """Import what ranks need, unless the launcher ends meanwhile.

    That takes seconds, on a busy machine many, and the server does not look at the launcher before
    its imports are done. It goes on after an ImportError.
    """

    def look(number: int, frame: FrameType | None) -> None:
        if os.getppid() != launcher and not signals.is_swallowing(frame):
            raise ImportError("the launcher is gone")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)
    try:
        import runner.launch.rank  # noqa: F401
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _remove_socket(server: int) -> None:
    """Remove the server's socket and its folder, which a launcher that was killed has left."""
    address = getattr(forkserver, "_forkserver")._forkserver_address  # noqa: B009
    if os.getpid() == server and address:
        with suppress(OSError):
            os.unlink(address)
            Path(address).parent.rmdir()


if _LAUNCHER in os.environ:  # this is the server
    atexit.register(_remove_socket, os.getpid())
    _import_rank(int(os.environ.pop(_LAUNCHER)))
