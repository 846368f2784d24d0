"""The rows of a run as one series for each key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runner.run_folder import keys
from runner.run_folder.rows import read_rows
from runner.run_folder.strict_json import number

Floats = NDArray[np.float64]

# Keys that the page shows; the others are not kept.
KEYS = frozenset(
    {
        *(keys.TRAIN_LOSS, keys.EVAL_LOSS, keys.EVAL_ACCURACY),
        *(keys.GRAD_NORM, keys.GRAD_NORM_MAX, keys.GRAD_NORM_SCALED, keys.GRAD_NONFINITE),
        *(keys.CLIP_SKIPPED, keys.CLIP_THRESHOLD, keys.CLIP_COEF, keys.CLIP_CLIPPED),
        *(keys.CLIP_FRACTION, keys.CLIP_RATIO, keys.CLIP_RATIO_TOTAL),
        *map(keys.noise_scale, (keys.NOISE_MICROBATCHES, keys.NOISE_RANKS)),
    }
)


@dataclass(frozen=True)
class Series:
    """Values of one metric over steps."""

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> Floats:
        """Finite values."""
        return self.values[np.isfinite(self.values)]


def drawn(value: object) -> float | None:
    """Return a number of a record as a chart or a mean can use it; None if it is none."""
    found = number(value)
    if found is None or 1e-150 <= abs(found) <= 1e150 or not found:
        return found
    return found if math.isnan(found) else math.copysign(math.inf if abs(found) > 1 else 0.0, found)


EMPTY = Series(np.empty(0), np.empty(0))


def read_series(path: Path, extra: Iterable[str] = ()) -> dict[str, Series]:
    """Read all series of a file of rows; empty if the file is missing."""
    wanted = KEYS.union(extra)
    columns: dict[str, tuple[list[object], list[object]] | None] = {}
    for row in read_rows(path):
        step = row.get(keys.TRAIN_STEP)
        for key, value in row.items():
            if key not in columns:
                shown = key in wanted or key.startswith((keys.WHAT_IF, keys.LAYER_NORM))
                columns[key] = ([], []) if shown else None
            if (column := columns[key]) is not None:
                column[0].append(step)
                column[1].append(value)
    found = {key: _series(*column) for key, column in columns.items() if column}
    return {key: one for key, one in found.items() if len(one)}


def what_if(series: Mapping[str, Series]) -> dict[float, float]:
    """Return the last recorded share of steps that each threshold would have clipped, rising."""
    shares: dict[float, float] = {}
    for text, one in _by_suffix(series, keys.WHAT_IF).items():
        try:
            threshold = float(text)
        except ValueError:
            continue
        if len(one.finite):
            shares[threshold] = float(one.finite[-1])
    return dict(sorted(shares.items()))


def layers(series: Mapping[str, Series]) -> dict[str, Series]:
    """Return the gradient norm of each parameter, in recorded order."""
    return _by_suffix(series, keys.LAYER_NORM)


def _by_suffix(series: Mapping[str, Series], prefix: str) -> dict[str, Series]:
    """Return the series whose key begins with ``prefix`` by the rest of their key."""
    return {key[len(prefix) :]: one for key, one in series.items() if key.startswith(prefix)}


def _series(steps: list[object], values: list[object]) -> Series:
    at, of = _drawn(steps), _drawn(values)
    if not np.isfinite(at).all() or any(type(value) not in (int, float) for value in values):
        known = [i for i, v in enumerate(values) if math.isfinite(at[i]) and number(v) is not None]
        at, of = at[known], of[known]
    if np.all(np.diff(at) > 0):
        return Series(at, of)
    # np.unique keeps the first of equal steps: in reversed order, the row written last.
    unique, first = np.unique(at[::-1], return_index=True)
    return Series(unique, of[::-1][first])


def _drawn(values: list[object]) -> Floats:
    """Return what :func:`drawn` returns for each value; NaN where it returns None."""
    if set(map(type, values)) <= {int, float}:
        with suppress(OverflowError):
            array = np.asarray(values, dtype=np.float64)
            size = np.abs(array)
            array[size > 1e150] *= np.inf
            array[size < 1e-150] *= 0.0
            return array
    return np.asarray([math.nan if (one := drawn(value)) is None else one for value in values])
