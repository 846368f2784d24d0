"""Rows of metrics: written one JSON object a line, read, and followed while the file grows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

from runner.config import disk
from runner.run_folder import keys
from runner.run_folder.strict_json import decode

Row: TypeAlias = dict[str, int | float]
"""Metrics of one optimizer step by key, on the host. It always has `keys.TRAIN_STEP`."""


class JsonlSink:
    """Append each row to a file at once, so that a killed run loses no row it reported."""

    def __init__(self, path: Path) -> None:
        from pydantic_core import to_json  # a tenth of the time of json; 20 ms to import

        self._path = path
        self._encode = partial(to_json, inf_nan_mode="strings")
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(None, 0)

    def write(self, row: Row) -> None:
        """Append one line. A disk that is full raises an OSError that names it."""
        line = self._encode(row) + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise disk.described(error, self._path, f"a row of {self._path.name}") from error

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Close the file; summary and exit code have files of their own."""
        self._file.close()


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file whose run may have been killed, or may still be running."""
    from pydantic_core import from_json  # four times as fast as json; 20 ms to import

    with suppress(OSError), path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                yield decode(line, from_json)


def last_step(path: Path) -> int:
    """Return the largest step of the rows of a file; 0 if there are none."""
    steps = (row.get(keys.TRAIN_STEP) for row in read_rows(path))
    return max((step for step in steps if isinstance(step, int)), default=0)


def cut(path: Path, step: int) -> None:
    """Remove the rows after an optimizer step, in place: another process may follow the file."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        kept = 0
        with suppress(ValueError):  # of a row that is torn, when its process was killed
            for line in file:
                if decode(line).get(keys.TRAIN_STEP, 0) > step:
                    break
                kept += len(line)
        file.truncate(kept)


def follow(
    path: Path, stopped: threading.Event, poll: float = 0.1, start: int = 0
) -> Iterator[Row]:
    """Yield the row of each further step while other processes append rows, and cut some."""
    while not path.exists():
        if stopped.wait(poll) and not path.exists():
            return
    kept, last = b"", 0
    with path.open("rb") as file:
        file.seek(start)
        while True:
            # Read the event before the file: rows written before it was set are never missed.
            ending = stopped.is_set()
            size = os.fstat(file.fileno()).st_size
            if size < file.tell():  # ranks that start again have cut it
                kept = b""
                file.seek(min(start, size))
            *lines, kept = (kept + file.read()).split(b"\n")
            for line in lines:
                row = decode(line)
                if (step := int(row[keys.TRAIN_STEP])) > last:
                    last = step
                    yield row
            if ending:
                return
            stopped.wait(poll)
