"""Files that are replaced as a whole, and JSON that any program can read: objects, and rows.

A number that is not finite is written as the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``,
as Protocol Buffers do (https://protobuf.dev/programming-guides/json) and as
``wandb leet inspect --json`` prints it. ``metrics.jsonl`` has one object a line.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

from runner.config.folders import not_written
from runner.run_folder import keys

Row: TypeAlias = dict[str, int | float]
"""Metrics of one optimizer step by key, on the host. It always has `keys.TRAIN_STEP`."""

_POLL = 0.1  # seconds between two looks at a file that grows
_NUMBERS = (int, float)
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path that is renamed to ``path`` at the end: no reader sees a part of the content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise not_written(error, path, path.name) from error


def encode(value: Any, *, indent: int | None = None) -> str:
    """Return the JSON text of a JSON-like value. A finite float reads back bit for bit."""
    return json.dumps(spelled(value), allow_nan=False, indent=indent)


def decode(text: str | bytes, loads: Callable[[str | bytes], Any] = json.loads) -> dict[str, Any]:
    """Return the object of a JSON text, with numbers that are not finite as floats."""
    record = loads(text)
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object: {text[:80]!r}")
    # Most values of a row are numbers: they are not passed to the function.
    return {
        key: value if isinstance(value, _NUMBERS) else _floats(value)
        for key, value in record.items()
    }


def spelled(value: Any) -> Any:
    """Return ``value`` with each number that is not finite as a string."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {key: spelled(item) for key, item in value.items()}
        case list() | tuple():
            return [spelled(item) for item in value]
    return value


def _floats(value: Any) -> Any:
    match value:
        case str():
            return _NONFINITE.get(value, value)
        case dict():
            return {key: _floats(item) for key, item in value.items()}
        case list():
            return [_floats(item) for item in value]
    return value


def write_object(path: Path, value: dict[str, Any]) -> None:
    write_text(path, encode(value, indent=2) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or damaged."""
    try:
        return decode(path.read_bytes())
    except (OSError, ValueError):
        return {}


def number(value: object) -> float | None:
    """Return a number of a record, spelled as a string or not, as a float; None if it is none."""
    if isinstance(value, _NUMBERS) and not isinstance(value, bool):
        return float(value)
    return _NONFINITE.get(value) if isinstance(value, str) else None


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
            raise not_written(error, self._path, f"a row of {self._path.name}") from error

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
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


def follow(path: Path, stopped: threading.Event, start: int = 0) -> Iterator[Row]:
    """Yield the row of each further step while other processes append rows, and cut some."""
    while not path.exists():
        if stopped.wait(_POLL) and not path.exists():
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
            stopped.wait(_POLL)
