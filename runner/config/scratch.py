"""What a run needs of its machine besides its own folder: temporary files and shared memory."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from runner.config.problem import NOTHING, Problem
from runner.config.schema import RunConfig
from runner.config.sizes import least_ranks

SHARED = Path("/dev/shm")
"""Where Linux keeps the semaphores and the shared memory of processes."""

LONGEST = 75
"""Bytes of the temporary folder's path. Names of sockets have 107 at most, and multiprocessing adds
``/pymp-xxxxxxxx/listener-xxxxxxxx`` to it."""


def missing(config: RunConfig) -> list[Problem]:
    """Return a problem for each that this machine does not have."""
    problems = []
    try:
        length = len(os.fsencode(tempfile.gettempdir()))
    except OSError as error:
        message = f"must be a folder that can be written: {error.strerror}"
        problems.append(Problem("TMPDIR", os.environ.get("TMPDIR", NOTHING), message))
    else:
        if length > LONGEST and _shares(config):
            message = (
                f"its path has {length} bytes, but names of sockets below it leave room for "
                f"{LONGEST}: choose a shorter one, such as /tmp"
            )
            problems.append(Problem("TMPDIR", tempfile.gettempdir(), message))
    if sys.platform == "linux" and (key := _shares(config)) and (why := _unwritable(SHARED)):
        value = config.data.num_workers if key == "data.num_workers" else NOTHING
        message = f"its processes need shared memory, and {SHARED} cannot be written: {why}"
        problems.append(Problem(key, value, message))
    return problems


def _shares(config: RunConfig) -> str | None:
    """Return the key by which a run has several processes on this machine; None if it has one."""
    if config.data.num_workers:
        return "data.num_workers"
    return "plugin" if least_ranks(config.plugin) > 1 else None


def _unwritable(folder: Path) -> str | None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
