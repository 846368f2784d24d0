"""Files that are replaced as a whole, and JSON that any program can read.

A number that is not finite is written as the string ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``,
as Protocol Buffers do (https://protobuf.dev/programming-guides/json) and as
``wandb leet inspect --json`` prints it.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.config import disk

_NUMBERS = (int, float)
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``, which is renamed to ``path`` at the end.

    A reader sees the old content or the new one, never a part of it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8."""
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise disk.described(error, path, path.name) from error


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


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Replace ``path`` by the indented JSON text of ``value``."""
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


def _floats(value: Any) -> Any:
    match value:
        case str():
            return _NONFINITE.get(value, value)
        case dict():
            return {key: _floats(item) for key, item in value.items()}
        case list():
            return [_floats(item) for item in value]
    return value
