"""Say that a disk is full in one line: which disk, and what was not written."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(OSError):
    def __str__(self) -> str:
        return str(self.args[-1])


def told(error: BaseException | None) -> str | None:
    """Return the message of a full disk, on one line, if ``error`` is one or was caused by one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return str(error) if isinstance(error, DiskFull) else error.strerror
        error = error.__cause__ or error.__context__
    return None


def told_by_rank(text: str) -> str | None:
    """Return the same for the traceback of another process."""
    signs = "|".join(rf"\[Errno {number}\] " for number in _FULL)
    found = re.search(rf"(?:DiskFull: |{signs})(.*)\s*\Z", text)
    return found[1] if found else None


def described(error: OSError, path: Path, what: str) -> OSError:
    """Return ``error`` with a message of one line that says what could not be written."""
    if error.errno not in _FULL:
        reason = error.strerror or str(error)
        return OSError(error.errno, f"{what} could not be written to {path}: {reason}")
    place = path.resolve()
    while not os.path.ismount(place):
        place = place.parent
    return DiskFull(errno.ENOSPC, f"the disk {place} is full: {what} could not be written")


def require_room(folder: Path) -> None:
    """Refuse to begin on a disk that has no room for the record of a run (64 kB)."""
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if shutil.disk_usage(there).free < 2**16:
        raise described(OSError(errno.ENOSPC, ""), folder, folder.name)
