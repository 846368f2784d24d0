"""Where rows go: a file, a sink, or a function of one row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runner.run_folder import files, keys
from runner.run_folder.strict_json import JsonlSink, Row, number, read_rows
from runner.telemetry.sinks import Sink

To = Path | str | Sink | Callable[[Row], Any]


class RowsFile:
    """Appends rows to a file, which is made. Rows of an earlier run that begins anew move aside.

    They are an earlier run's if the first row is of no later step than theirs: a page would take
    both for one run.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = JsonlSink(path)
        self._has_begun = False
        self._is_closed = False

    def write(self, row: Row) -> None:
        """Append one row."""
        if self._is_closed:
            raise ValueError(f"{self._path} is closed: record steps before close()")
        if not self._has_begun and keys.GRAD_NORM in row:
            self._has_begun = True
            self._move_earlier(row[keys.TRAIN_STEP])
        self._file.write(row)

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Close the file."""
        self._is_closed = True
        self._file.close(summary, exit_code)

    def _move_earlier(self, first_step: float) -> None:
        path = self._path
        steps = [number(row.get(keys.TRAIN_STEP)) or 0 for row in read_rows(path)]
        if max(steps, default=0) < first_step:
            return
        names = (path.with_name(f"{path.stem}.{part}{path.suffix}") for part in count(1))
        aside = next(name for name in names if not name.exists())
        self._file.close(None, 0)
        path.rename(aside)
        self._file = JsonlSink(path)
        warnings.warn(
            f"{path} had rows up to step {max(steps):,.0f} of an earlier run, which are in {aside} "
            "now; to go on with that run, load its state_dict before the first step",
            stacklevel=2,
        )


def sink_of(to: To) -> Any:
    """Return the sink of a destination; a file is opened, and rows are appended to it."""
    if isinstance(to, str | Path):
        return RowsFile(file_of(to))
    return SimpleNamespace(write=to, close=lambda *_: None) if callable(to) else to


def file_of(to: Path | str) -> Path:
    """Return the file of rows that a path names; in a folder it is ``metrics.jsonl``.

    A path without a suffix is a folder, unless it is a file already.
    """
    path = Path(to)
    is_folder = path.is_dir() or not (path.suffix or path.is_file())
    return path / files.ROWS if is_folder else path
