"""Files that are replaced as a whole, and JSON that any program can read: objects, and rows.

A number that is not finite is written as the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``,
as Protocol Buffers do (https://protobuf.dev/programming-guides/json).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeAlias

from runner.config.masking import hidden_in
from runner.config.reading import (
    MOST_LINE,
    DamagedFile,
    content_of,
    opened,
    require_shallow,
    too_deep,
)
from runner.run_folder import keys

Row: TypeAlias = dict[str, int | float]  # metrics of one step by key, with `keys.TRAIN_STEP`
_POLL = 0.1  # seconds between two looks at a file that grows
_NUMBERS = (int, float)
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path that is renamed to ``path`` at the end."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a text file. An OSError says in one line why it could not be written."""
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise not_written(error, path, path.name) from error


def obstacle(folder: Path) -> str | None:
    """Return why ``folder`` cannot be created and written; None if it can."""
    parent = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with suppress(FileNotFoundError):
            os.lstat(folder)  # refuses a name that is too long
        with tempfile.TemporaryDirectory(prefix=".writable-", dir=parent):
            return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        return f"must be a folder that can be written: {parent}: {why}"


def not_written(error: OSError, path: Path, what: str) -> OSError:
    """Return ``error`` with a message of one line that says what could not be written."""
    if error.errno not in _FULL:
        why = error.strerror or str(error)
        return OSError(error.errno, f"{what} could not be written to {path}: {why}")
    place = path.resolve()
    while not os.path.ismount(place):
        place = place.parent
    return OSError(errno.ENOSPC, f"the disk {place} is full: {what} could not be written")


def disk_full(error: BaseException | str | None) -> str | None:
    """Return the one line of a full disk, if ``error``, or its traceback, says one; else None."""
    if isinstance(error, BaseException):
        text = "".join(traceback.format_exception(error))
    else:
        text = str(error)
    codes = "|".join(str(code) for code in _FULL)
    messages = re.findall(rf"\[Errno (?:{codes})\] (.*)", text)
    return messages[-1] if messages else None


def encode(value: Any, *, indent: int | None = None) -> str:
    """Return the JSON text of a JSON-like value. A finite float reads back bit for bit."""
    return json.dumps(spelled(value), allow_nan=False, indent=indent)


def decode(text: str | bytes, loads: Callable[[str | bytes], Any] = json.loads) -> dict[str, Any]:
    """Return the object of a JSON text, with numbers that are not finite as floats."""
    return _object(loads(text))


def _object(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object: {str(record)[:80]}")
    # Most values of a row are numbers: a call for each would take longer.
    return {
        key: value if isinstance(value, _NUMBERS) else _floats(value)
        for key, value in record.items()
    }


def spelled(value: Any) -> Any:
    """Return ``value`` with each number that is not finite as a string."""
    return _changed(value, _spelled)


def _spelled(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _floats(value: Any) -> Any:
    """Return ``value`` with each string of `spelled` as a number."""
    return _changed(value, _unspelled)


def _unspelled(value: Any) -> Any:
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a JSON-like value with each item of its containers changed."""
    if isinstance(value, dict):
        return {_spelled(key): _changed(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item, change) for item in value]
    return change(value)


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file; secrets in its texts are masked."""
    write_text(path, encode(hidden_in(value), indent=2) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or torn.

    A DamagedFile says that the file is none that a run has written.
    """
    try:
        return decode_file(path)
    except (OSError, ValueError):
        return {}


def decode_file(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. An OSError or a ValueError says that there is none."""
    try:
        record = json.loads(content_of(path))
    except RecursionError:
        raise too_deep(path) from None
    require_shallow(path, record)
    return _object(record)


def number(value: object) -> float | None:
    """Return a number of a record, spelled as a string or not, as a float; None if it is none."""
    if isinstance(value, _NUMBERS) and not isinstance(value, bool):
        return float(value)
    return _NONFINITE.get(value) if isinstance(value, str) else None


class JsonlSink:
    """Append each row to a file at once."""

    def __init__(self, path: Path) -> None:
        from pydantic_core import to_json  # a tenth of the time of json; 20 ms to import

        self._path = path
        self._to_json = to_json
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(None, 0)

    def write(self, row: Row) -> None:
        """Append one line. A disk that is full raises an OSError that names it."""
        line = self._to_json(row, inf_nan_mode="strings") + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise not_written(error, self._path, f"a row of {self._path.name}") from error

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file that may not be complete."""
    from pydantic_core import from_json  # four times as fast as json; 20 ms to import

    with suppress(OSError), opened(path) as file:
        while line := file.readline(MOST_LINE):
            if len(line) == MOST_LINE:
                raise DamagedFile(path, f"a line is longer than {MOST_LINE / 2**20:g} MiB")
            with suppress(ValueError):
                yield decode(line, from_json)


def cut(path: Path, step: int) -> None:
    """Remove the rows after an optimizer step, in place: another process may follow the file."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        kept = 0
        with suppress(ValueError):  # of a row that is torn, when its process was killed
            for line in file:
                if (number(decode(line).get(keys.TRAIN_STEP)) or 0) > step:
                    break
                kept += len(line)
        file.truncate(kept)


def follow(path: Path, stopped: threading.Event, start: int = 0) -> Iterator[Row]:
    """Yield the row of each further step while other processes append rows, and cut some."""
    while not path.exists():
        if stopped.wait(_POLL) and not path.exists():
            return
    torn = b""  # the start of a row that is not complete yet
    last_step = 0
    with path.open("rb") as file:
        file.seek(start)
        while True:
            ending = stopped.is_set()  # before the file: no row that was written before is missed
            size = os.fstat(file.fileno()).st_size
            if size < file.tell():  # ranks that start again have cut it
                torn = b""
                file.seek(min(start, size))
            *lines, torn = (torn + file.read()).split(b"\n")
            for line in lines:
                row = decode(line)
                step = int(row[keys.TRAIN_STEP])
                if step > last_step:
                    last_step = step
                    yield row
            if ending:
                return
            stopped.wait(_POLL)
