"""Append lines to a file that may be on a full disk: what does not fit now is written later."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

MOST_BYTES = 2**26
"""Bytes to keep in memory, before the oldest lines are dropped."""


class PatientFile:
    """Appends lines, each at once. A line that cannot be written is kept for the next try."""

    def __init__(self, path: Path, most: int = MOST_BYTES) -> None:
        self.path = path
        self.error: OSError | None = None
        self.dropped = 0
        self._most = most
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._torn = 0  # bytes of the first line that is kept which are in the file already
        self._descriptor: int | None = None

    @property
    def missing(self) -> int:
        """Number of lines that are not in the file."""
        return len(self._kept) + self.dropped

    @property
    def size(self) -> int:
        """Number of bytes that are kept in memory."""
        return self._size

    def append(self, line: bytes) -> None:
        """Append a line with its newline, after those that were kept. No OSError is raised."""
        self._kept.append(line)
        self._size += len(line)
        self.flush()
        if self._size > self._most:
            oldest = int(self._torn > 0)  # that may go
            while self._size > self._most and len(self._kept) > 1 + oldest:
                self._size -= len(self._kept[oldest])
                del self._kept[oldest]
                self.dropped += 1

    def flush(self) -> None:
        """Try to write what is kept."""
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o666)
            while self._kept:
                line = self._kept[0]
                written = os.write(self._descriptor, line)  # fewer bytes where the disk ends
                self._size -= written
                if written < len(line):
                    self._kept[0] = line[written:]
                    self._torn += written
                else:
                    self._kept.popleft()
                    self._torn = 0
        except OSError as error:
            self.error = error
        else:
            self.error = None

    def close(self) -> None:
        """Try once more to write what is kept, and close the file. No torn line is left in it."""
        self.flush()
        if self._descriptor is not None:
            if self._torn:
                whole = os.fstat(self._descriptor).st_size - self._torn
                os.ftruncate(self._descriptor, whole)
            os.close(self._descriptor)
            self._descriptor = None
