"""Rows as JSON, one object a line: ``metrics.jsonl``, written, read, and followed while it grows.

The JSON is strict, so that any program can read it: a number that is not finite is written as the
string "NaN", "Infinity" or "-Infinity", as Protocol Buffers do
(https://protobuf.dev/programming-guides/json) and as ``wandb leet inspect --json`` prints it.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, TypeAlias

Row: TypeAlias = dict[str, int | float]
"""Metrics of one optimizer step by key, on the host. Always has ``train/step``."""

_NONFINITE: dict[str, Any] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON of a JSON-like value. A finite float reads back bit for bit.

    Raises:
        TypeError: something inside has no JSON form (a tensor, a path).
    """
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_spelled(value), allow_nan=False, indent=indent)


def decode(line: str) -> Row:
    """The row of one line, with the three words turned back into floats.

    Raises:
        ValueError: the line is no JSON object.
    """
    row: Any = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"not a row: {line[:80]!r}")
    return {
        key: _NONFINITE.get(value, value) if isinstance(value, str) else value
        for key, value in row.items()
    }


class JsonlSink:
    """Appends each row to a file and flushes it, so that a killed run loses nothing it reported.

    Args:
        path: the file; its folder exists. Rows already there are kept.
    """

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append one line."""
        self._file.write(encode(row) + "\n")
        self._file.flush()

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Close the file; the summary and the exit code have files of their own."""
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """All rows of a file.

    A last line without its newline was being written when the run was killed; it is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a complete line is no JSON object; the message names the line.
    """
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(decode(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    return rows


def follow(path: Path, stopped: threading.Event, poll: float = 0.1) -> Iterator[Row]:
    """Rows as another process appends them.

    Waits for the file to appear and, at its end, for more. A line without its newline stays back
    until the rest comes.

    Args:
        path: the file.
        stopped: set when nothing more will be written; what is complete by then is still yielded.
        poll: seconds between looks.
    """
    while not path.exists():
        if stopped.wait(poll) and not path.exists():
            return
    kept = b""
    with path.open("rb") as file:
        while True:
            # Asked before reading: what was written before the event was set is then never missed.
            ending = stopped.is_set()
            *lines, kept = (kept + file.read()).split(b"\n")
            for line in lines:
                yield decode(line.decode("utf-8"))
            if ending:
                return
            stopped.wait(poll)


def _spelled(value: Any) -> Any:
    """The same value with every number that is not finite as its word."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {key: _spelled(item) for key, item in value.items()}
        case list() | tuple():
            return [_spelled(item) for item in value]
    return value
