"""Say that a disk is full in one line: which disk, what was not written, how much it needs."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)

NEEDED = 2**20
"""Bytes that a run needs besides its checkpoints, and that a message asks for at least."""


class DiskFull(OSError):
    """A disk is full; the message is one line that names it and the space needed."""

    def __str__(self) -> str:
        return str(self.args[-1])

    def __reduce__(self) -> tuple[type[DiskFull], tuple[object, ...]]:
        return type(self), self.args


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, is that of a full disk or quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def full(path: Path, what: str, needed: int = 0) -> DiskFull:
    """Return the error of something that did not fit on the disk of ``path``."""
    disk = mount_of(path)
    text = (
        f"the disk {disk} is full ({size(free(disk))} free): {what} could not be written; "
        f"free at least {size(max(needed, NEEDED))}"
    )
    return DiskFull(errno.ENOSPC, text)


def described(error: OSError, path: Path, what: str, needed: int = 0) -> OSError:
    """Return ``error`` with a message of one line; see :func:`full`."""
    if is_full(error):
        return full(path, what, needed)
    reason = error.strerror or str(error)
    return OSError(error.errno, f"{what} could not be written to {path}: {reason}")


def told(error: BaseException | None) -> str | None:
    """Return the message of a full disk, on one line, if ``error`` is one or was caused by one."""
    while error is not None:
        if isinstance(error, DiskFull):
            return str(error)
        if isinstance(error, OSError) and error.errno in _FULL:
            if error.filename:
                path = Path(os.fsdecode(error.filename))
                return str(full(path, path.name))
            return error.strerror  # it may have been explained where it was raised
        error = error.__cause__ or error.__context__
    return None


def told_by_rank(text: str) -> str | None:
    """Return the same for the traceback of another process."""
    last = text.strip().rpartition("\n")[2]
    for sign in (f"{DiskFull.__name__}: ", *(f"[Errno {number}] " for number in _FULL)):
        if sign in last:
            return last.partition(sign)[2]
    return None


def shortage(folder: Path) -> str | None:
    """Return a message if the disk of ``folder`` lacks what a run needs besides checkpoints."""
    return str(full(folder, "a run")) if free(mount_of(folder)) < NEEDED else None


def mount_of(path: Path) -> Path:
    """Return the folder at which the disk of ``path`` is mounted."""
    place = path.resolve()
    while not os.path.ismount(place):
        place = place.parent
    return place


def free(path: Path) -> int:
    """Return the bytes that this user can still write to the disk of an existing folder."""
    return shutil.disk_usage(path).free


def size(count: int) -> str:
    """Format a number of bytes: ``12 kB``, ``3.4 MB``."""
    if count < 1_000_000:
        return f"{count / 1000:.0f} kB"
    power = min(len(str(count)) // 3 - (len(str(count)) % 3 == 0), 4)
    return f"{count / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"
