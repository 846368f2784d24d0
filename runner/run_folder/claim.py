"""Claim the folder of a run, so that no two processes write to it at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.config.problem import Problem, RequestError
from runner.run_folder import files

RELEASED = 5.0
"""Seconds to wait for the lock of a process that is gone: its children hold it until they end."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder of a run against other processes; it is made if there is none."""
    from filelock import FileLock, Timeout  # it imports asyncio, which readers do not need

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / files.LOCK, timeout=RELEASED):
            yield
    except Timeout:
        message = "another run is using this folder: wait for its end, or choose another folder"
        raise RequestError([Problem("hydra.run.dir", str(folder), message)]) from None
