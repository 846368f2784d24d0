"""What the fork server of local ranks imports: the rank, and what to do at its own end."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType

from runner.launch import signals

_LAUNCHER = "RUNNER_LAUNCHER"
"""Environment variable with the process that starts the server."""

_NEEDED = "RUNNER_PRELOADED"
"""Environment variable with the modules that ranks need, separated by commas."""

LOOK = 0.5
"""Seconds between two looks at the launcher while torch is imported."""


def ensure_running(needed: Iterable[str] = ()) -> None:
    """Start the server, unless it runs: a process that imports torch, and then forks ranks."""
    multiprocessing.set_forkserver_preload([__name__])
    os.environ |= {_LAUNCHER: str(os.getpid()), _NEEDED: ",".join(needed)}
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[_LAUNCHER], os.environ[_NEEDED]


def _import_rank(launcher: int, needed: Iterable[str]) -> None:
    """Import what ranks need, unless the launcher ends meanwhile."""

    def look(number: int, frame: FrameType | None) -> None:
        if os.getppid() != launcher and not signals.is_swallowing(frame):
            raise ImportError("the launcher is gone")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)
    try:
        import runner.launch.rank  # noqa: F401

        for name in needed:
            if os.getppid() == launcher:
                with suppress(Exception):  # a rank that imports it says what is wrong
                    import_module(name)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    gc.freeze()  # a rank that collects garbage need not copy the pages of all modules


def _remove_socket(server: int) -> None:
    """Remove the server's socket and its folder, which a launcher that was killed has left."""
    address = getattr(forkserver, "_forkserver")._forkserver_address  # noqa: B009
    if os.getpid() == server and address:
        with suppress(OSError):
            os.unlink(address)
            Path(address).parent.rmdir()


if _LAUNCHER in os.environ:  # this is the server
    atexit.register(_remove_socket, os.getpid())
    _import_rank(int(os.environ.pop(_LAUNCHER)), os.environ.pop(_NEEDED).split(","))
