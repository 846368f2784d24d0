"""Claim the folder of a run, so that no two processes write to it at the same time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.config.problem import Problem, RequestError
from runner.run_folder import files
from runner.run_folder.status import is_alive
from runner.run_folder.strict_json import read_object, write_object

RELEASED = 15.0
"""Seconds to wait for the lock of a process that is gone: its children hold it until they end."""

BEAT = 5.0
"""Seconds between two signs of life of the process that holds a folder."""

SILENCE = 4 * BEAT
"""Seconds without a sign of life after which a process of another host counts as gone."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder of a run against other processes; it is made if there is none."""
    from filelock import FileLock, Timeout  # it imports asyncio, which readers do not need

    folder.mkdir(parents=True, exist_ok=True)
    holder, lock = folder / files.HOLDER, FileLock(folder / files.LOCK)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if _is_here(holder):
                raise
            lock.acquire(timeout=RELEASED)
        if _beats(holder):
            raise Timeout(lock.lock_file)
    except Timeout:
        lock.release()
        raise RequestError([_refusal(folder)]) from None
    ended = threading.Event()
    beats = threading.Thread(target=_renew, args=(holder, ended), name="claim", daemon=True)
    try:
        write_object(holder, {"pid": os.getpid(), "host": socket.gethostname()})
        beats.start()
        yield
    finally:
        ended.set()
        with suppress(OSError):
            holder.unlink()
        lock.release()


def _renew(holder: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with suppress(OSError):
            os.utime(holder)


def _is_here(holder: Path) -> bool:
    """Return whether the holder is a process of this host that runs."""
    found = read_object(holder)
    pid = found.get("pid")
    return found.get("host") == socket.gethostname() and isinstance(pid, int) and is_alive(pid)


def _beats(holder: Path) -> bool:
    """Return whether a holder on another host, which has not released its folder, is alive."""
    host = read_object(holder).get("host")
    if host in (None, socket.gethostname()):
        return False  # this host shares its locks: the process is gone
    before, until = _renewed(holder), time.monotonic() + SILENCE
    while time.monotonic() < until:
        time.sleep(min(0.5, BEAT / 10))
        if _renewed(holder) != before:
            return holder.exists()
    return False


def _renewed(holder: Path) -> int:
    """Return when the holder gave its last sign of life, by the clock of the disk."""
    try:
        return holder.stat().st_mtime_ns
    except OSError:
        return 0


def _refusal(folder: Path) -> Problem:
    found = read_object(folder / files.HOLDER)
    who = f" (process {found['pid']} on {found['host']})" if {"pid", "host"} <= {*found} else ""
    message = f"another run is using this folder{who}: wait for its end, or choose another folder"
    return Problem("hydra.run.dir", str(folder), message)
