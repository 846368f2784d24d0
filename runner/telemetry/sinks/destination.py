"""Where rows go: a file, a sink, or a function of one row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runner.run_folder import files
from runner.run_folder.strict_json import JsonlSink, Row
from runner.telemetry.sinks import Sink

To = Path | str | Sink | Callable[[Row], Any]


def sink_of(to: To) -> Any:
    """Return the sink of a destination; a file is opened, and rows are appended to it."""
    if isinstance(to, str | Path):
        path = file_of(to)
        path.parent.mkdir(parents=True, exist_ok=True)
        return JsonlSink(path)
    return SimpleNamespace(write=to, close=lambda *_: None) if callable(to) else to


def file_of(to: Path | str) -> Path:
    """Return the file of rows that a path names; in a folder it is ``metrics.jsonl``."""
    return Path(to) / files.ROWS if Path(to).is_dir() else Path(to)
