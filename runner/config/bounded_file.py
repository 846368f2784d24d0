"""Read a file that may be something else than it should be."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

LARGEST = 64 * 2**20
"""Bytes of the largest file that is read as a whole; the record of 10,000 runs has 6 million."""


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe or a device, which may have no end.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115  # the caller closes it
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "is not a file", str(path))


def read_bounded(path: Path) -> bytes:
    """Return the content of a file of at most `LARGEST` bytes.

    Raises:
        OSError: it cannot be read, is no file, or is larger.
    """
    with open_file(path) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(errno.EFBIG, f"has more than {LARGEST:,} bytes", str(path))
    return content


def _without_waiting(path: str, flags: int) -> int:
    """Open a path; a pipe would wait for somebody to write to it."""
    return os.open(path, flags | os.O_NONBLOCK)
