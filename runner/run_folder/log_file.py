"""The handler of ``runner.log``, which outlives a full disk."""

from __future__ import annotations

import logging
from pathlib import Path

from runner.config.secrets import hide
from runner.run_folder.patient_file import PatientFile

MOST_BYTES = 2**20
"""Bytes of messages to keep while the disk is full."""


class LogFile(logging.Handler):
    """Append messages to a file, as :class:`logging.FileHandler` does."""

    def __init__(self, filename: str | Path) -> None:
        super().__init__()
        self.file = PatientFile(Path(filename), MOST_BYTES)

    def emit(self, record: logging.LogRecord) -> None:
        """Append one message, and those that did not fit before it."""
        try:
            text = hide(self.format(record)) + "\n"
            self.file.append(text.encode(errors="backslashreplace"))
        except Exception:  # as in every handler: the message is wrong, not the program
            self.handleError(record)

    def close(self) -> None:
        """Try once more to write what did not fit, and close the file."""
        self.acquire()
        try:
            self.file.close()
        finally:
            self.release()
        super().close()
