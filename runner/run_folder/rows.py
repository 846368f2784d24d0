"""Rows of metrics: written one JSON object a line, read, and followed while the file grows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeAlias

from runner.config import disk
from runner.config.notation import plural
from runner.run_folder import keys
from runner.run_folder.atomic import replacing
from runner.run_folder.patient_file import PatientFile
from runner.run_folder.strict_json import decode, fast_encoder

log = logging.getLogger(__name__)

LONGEST_LINE = 16 * 2**20
"""Bytes of a line that is still read as one; a row with the norms of 100,000 parameters has 10
million."""

Row: TypeAlias = dict[str, int | float]
"""Metrics of one optimizer step by key, on the host. It always has `keys.TRAIN_STEP`."""


class JsonlSink:
    """Append each row to a file at once, so that a killed run loses no row it reported."""

    def __init__(self, path: Path) -> None:
        self._encode = fast_encoder()
        self._file = PatientFile(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file."""
        self.close(None, 0)
        if missing := self._missing():
            if kind is None:
                raise missing
            log.warning("%s", missing.args[-1])

    def write(self, row: Row) -> None:
        """Append one line."""
        before = self._file.error
        self._file.append(self._encode(row) + b"\n")
        error = self._file.error
        if error is not None and before is None:
            why = disk.described(error, self._file.path, f"rows of {self._file.path.name}")
            log.warning("%s; rows are kept in memory until then", why.args[-1])

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Close the file; summary and exit code have files of their own."""
        self._file.close()

    def _missing(self) -> OSError | None:
        """Return why rows could not be written; None if all were."""
        file = self._file
        if not file.missing:
            return None
        what = f"{plural(file.missing, 'row')} of {file.path.name}"
        return disk.described(file.error or OSError(), file.path, what, file.size)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file whose run may have been killed, or may still be running."""
    from pydantic_core import from_json  # four times as fast as json; 20 ms to import

    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            try:
                yield decode(line, from_json)
            except ValueError:
                continue


def last_step(path: Path) -> int:
    """Return the largest step of the rows of a file; 0 if there are none."""
    steps = (row.get(keys.TRAIN_STEP) for row in read_rows(path))
    return max((step for step in steps if isinstance(step, int)), default=0)


def cut(path: Path, step: int) -> None:
    """Remove the rows after an optimizer step, and lines that are torn."""
    if not path.exists():
        return
    kept = 0
    with replacing(path) as temporary, JsonlSink(temporary) as sink:
        for row in read_rows(path):
            at = row.get(keys.TRAIN_STEP)
            if isinstance(at, int) and kept < at <= step:
                sink.write(row)
                kept = at


def follow(
    path: Path, stopped: threading.Event, poll: float = 0.1, start: int = 0
) -> Iterator[Row]:
    """Yield rows while another process appends them."""
    while not path.exists():
        if stopped.wait(poll) and not path.exists():
            return
    kept = b""
    with path.open("rb") as file:
        file.seek(start)
        while True:
            # Read the event before the file: rows written before it was set are never missed.
            ending = stopped.is_set()
            *lines, kept = (kept + file.read()).split(b"\n")
            for line in lines:
                yield decode(line)
            if ending:
                return
            stopped.wait(poll)
