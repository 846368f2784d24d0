"""Say that a disk is full in one line: which disk, and what was not written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(OSError):
    """A disk is full; the message is one line that names it."""

    def __str__(self) -> str:
        return str(self.args[-1])


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, is that of a full disk or quota."""
    return told(error) is not None


def told(error: BaseException | None) -> str | None:
    """Return the message of a full disk, on one line, if ``error`` is one or was caused by one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return str(error) if isinstance(error, DiskFull) else error.strerror
        error = error.__cause__ or error.__context__
    return None


def told_by_rank(text: str) -> str | None:
    """Return the same for the traceback of another process."""
    last = text.strip().rpartition("\n")[2]
    for sign in (f"{DiskFull.__name__}: ", *(f"[Errno {number}] " for number in _FULL)):
        if sign in last:
            return last.partition(sign)[2]
    return None


def described(error: OSError, path: Path, what: str, needed: int = 0) -> OSError:
    """Return ``error`` with a message of one line that says what could not be written."""
    if error.errno not in _FULL:
        reason = error.strerror or str(error)
        return OSError(error.errno, f"{what} could not be written to {path}: {reason}")
    place = mount_of(path)
    text = f"the disk {place} is full ({size(free(place))} free): {what} could not be written"
    return DiskFull(errno.ENOSPC, text)


def require_room(folder: Path) -> None:
    """Refuse to begin on a disk that has no room for the record of a run (64 kB)."""
    if free(mount_of(folder)) < 2**16:
        raise described(OSError(errno.ENOSPC, ""), folder, folder.name)


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
