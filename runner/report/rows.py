"""Reading ``metrics.jsonl``: one JSON object a line, into one series a key.

The file of a run that was killed may end in half a line, and that of a run that was resumed may
hold a step twice; both are read without complaint. Numbers that are not finite are written as the
strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NONFINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}

# What the page draws or tells of; the rest of a row is not kept.
KEYS = frozenset(
    {
        "train/loss",
        "eval/loss",
        "eval/accuracy",
        "grad/norm",
        "grad/norm_max",
        "grad/nonfinite",
        "clip/threshold",
        "clip/coef",
        "clip/clipped",
        "clip/ratio",
        "clip/ratio_total",
    }
)
_WHAT_IF = "clip/what_if/"
# Two norms of the whole gradient that are spelled like none of a layer.
_LAYER = "grad/norm/"


@dataclass(frozen=True)
class Series:
    """Values of one key over steps.

    Attributes:
        steps: optimizer steps, rising, shape (n,).
        values: of the same shape; may hold NaN and infinities.
    """

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> Floats:
        """The finite values alone."""
        return self.values[np.isfinite(self.values)]


EMPTY = Series(np.empty(0), np.empty(0))


def read_rows(path: Path, extra: frozenset[str] = frozenset()) -> dict[str, Series]:
    """All series of a ``metrics.jsonl``; empty where the file is missing.

    Args:
        path: of the file.
        extra: keys to keep beyond `KEYS`, ``clip/what_if/<λ>`` and ``grad/norm/<parameter>``.

    Returns:
        Series by key. Where a step stands twice the later row holds.
    """
    wanted = KEYS | extra
    columns: dict[str, tuple[array[float], array[float]]] = {}
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return {}
    with file:
        for line in file:
            row = _row(line)
            step = row.get("train/step")
            if not isinstance(step, int | float):
                continue
            for key, raw in row.items():
                if key not in wanted and not key.startswith((_WHAT_IF, _LAYER)):
                    continue
                value = number(raw)
                if value is None:
                    continue
                column = columns.get(key)
                if column is None:
                    column = columns[key] = (array("d"), array("d"))
                column[0].append(step)
                column[1].append(value)
    return {key: _series(*column) for key, column in columns.items()}


def number(raw: object) -> float | None:
    """A number as it stands in a record, or None where it is none."""
    if isinstance(raw, float | int):
        return float(raw)
    return NONFINITE.get(raw) if isinstance(raw, str) else None


def numbers(record: object) -> object:
    """A record (nested objects and lists) with the strings of non-finite numbers turned back."""
    match record:
        case dict():
            return {str(key): numbers(value) for key, value in record.items()}
        case list():
            return [numbers(value) for value in record]
        case str() if record in NONFINITE:
            return NONFINITE[record]
        case _:
            return record


def by_suffix(series: Mapping[str, Series], prefix: str) -> dict[str, Series]:
    """The series whose key begins with ``prefix``, by the rest of their key."""
    return {key[len(prefix) :]: one for key, one in series.items() if key.startswith(prefix)}


def what_if(series: Mapping[str, Series]) -> dict[float, float]:
    """Threshold to share of steps it would have clipped, as last recorded; rising thresholds."""
    shares: dict[float, float] = {}
    for text, one in by_suffix(series, _WHAT_IF).items():
        try:
            threshold = float(text)
        except ValueError:
            continue
        if len(one.finite):
            shares[threshold] = float(one.finite[-1])
    return dict(sorted(shares.items()))


def layers(series: Mapping[str, Series]) -> dict[str, Series]:
    """The gradient norm of each parameter, in the order the run recorded them."""
    return by_suffix(series, _LAYER)


def _row(line: bytes) -> dict[str, Any]:
    """One line as an object; empty where the line is torn or is no object."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _series(steps: array[float], values: array[float]) -> Series:
    at = np.frombuffer(steps, dtype=np.float64)
    of = np.frombuffer(values, dtype=np.float64)
    if np.all(np.diff(at) > 0):
        return Series(at, of)
    # np.unique keeps the first of equals: reversed, that is the row written last.
    unique, first = np.unique(at[::-1], return_index=True)
    return Series(unique, of[::-1][first])
