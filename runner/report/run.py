"""Read the folder of one run: its record, its rows as one series a key, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from runner.config.modes import ModeInfo, info_of
from runner.config.notation import higher_is_better
from runner.run_folder import files, keys
from runner.run_folder.status import elapsed, state_of
from runner.run_folder.strict_json import number, read_object, read_rows

Floats = NDArray[np.float64]
Metrics = dict[str, float | None]
"""Metrics of a run by the names of their columns; None where the run recorded nothing."""

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
DIVERGED = "diverged_at"


class NoRunError(Exception):
    """A folder is missing, or holds neither a run nor a sweep."""


@dataclass(frozen=True)
class Series:
    """Values of one metric over steps."""

    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> Floats:
        return self.values[np.isfinite(self.values)]


EMPTY = Series(np.empty(0), np.empty(0))


@dataclass(frozen=True)
class Run:
    """One training job."""

    folder: Path | None
    number: str
    state: str
    error: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    series: Mapping[str, Series] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def typed(self) -> dict[str, str]:
        pairs = (word.lstrip("+~").split("=", 1) for word in self.overrides if "=" in word)
        return {key.partition("@")[0]: value for key, value in pairs}

    @property
    def seed(self) -> str:
        """Seed, by which settings are compared; the number of the run if it has none."""
        seed = self.config.get("seed", self.typed.get("seed"))
        return f"run {self.number}" if seed is None else str(seed)

    @property
    def mode(self) -> str:
        given = self.config.get("clip.mode") if self.config else self.typed.get("clip")
        return str(given or "")

    @cached_property
    def info(self) -> ModeInfo:
        """Facts about the clipping mode, as the run recorded them if the mode is a user's own."""
        recorded = self.summary.get(keys.CLIP_MODE)
        return info_of(self.mode, recorded if isinstance(recorded, dict) else None)

    @property
    def threshold(self) -> float | None:
        """Configured λ, or the override if there is no configuration; None without clipping."""
        try:
            threshold = drawn(float((self.config or self.typed).get("clip.threshold")))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return None
        known = self.info.clips is not None and threshold and 0 < threshold < math.inf
        return threshold if known else None

    def of(self, key: str) -> Series:
        return self.series.get(key, EMPTY)

    def recorded(self, key: str) -> bool:
        final = self.summary.get("final")
        return key in self.series or (isinstance(final, dict) and key in final)

    @property
    def limited(self) -> Series:
        """Norm of each row that λ limits: ‖G‖, without gradients that are not scaled."""
        return self.series.get(keys.GRAD_NORM_SCALED, self.of(keys.GRAD_NORM))

    @cached_property
    def layers(self) -> dict[str, Series]:
        return self._by_suffix(keys.LAYER_NORM)

    @cached_property
    def what_if(self) -> dict[float, float]:
        """Last recorded share of steps that each threshold would have clipped, rising."""
        found = self._by_suffix(keys.WHAT_IF).items()
        return dict(
            sorted((float(k), float(one.finite[-1])) for k, one in found if len(one.finite))
        )

    @cached_property
    def steps(self) -> int:
        known = [drawn(self.summary.get("steps")), drawn(self.status.get("step"))]
        known += [*map(float, self.of(keys.TRAIN_STEP).steps[-1:])]
        return int(max((value for value in known if value and math.isfinite(value)), default=0))

    @cached_property
    def diverged_at(self) -> int | None:
        """Step from which the loss stayed lost until the end: not finite, or twice its start."""
        loss = self.of(keys.TRAIN_LOSS)
        if not len(loss):
            return None
        beginning = loss.finite[:10]
        ceiling = 2 * float(np.median(beginning)) if len(beginning) else math.inf
        lost = ~np.isfinite(loss.values)
        if ceiling > 0:
            lost |= loss.values > ceiling
        # A run that finished may have lost the batch of its last step alone.
        alone = self.state == "finished" and len(lost) > 10 and not lost[-2]
        if not lost[-1] or alone:
            return None
        return int(loss.steps[int(np.flatnonzero(~lost)[-1]) + 1 if not lost.all() else 0])

    def _by_suffix(self, prefix: str) -> dict[str, Series]:
        return {k[len(prefix) :]: one for k, one in self.series.items() if k.startswith(prefix)}


def measure(run: Run, metrics: Sequence[str], maximized: Mapping[str | None, bool]) -> Metrics:
    """Return the metrics of a run; ``maximized`` has those with a direction of their own.

    ``summary.json`` covers every step and is used if it is there. A run that was killed never wrote
    it; its metrics are computed from its rows.
    """
    summary, coef = run.summary, run.of(keys.CLIP_COEF).finite
    found: Metrics = {}
    for key in metrics:
        final = _last(run, summary.get("final"), key)
        found[f"best/{key}"] = _best(run, key, maximized.get(key, higher_is_better(key)), final)
        found[f"final/{key}"] = final
    for key in (keys.CLIP_RATIO_TOTAL, keys.GRAD_NONFINITE, keys.CLIP_SKIPPED):
        found[key] = _last(run, summary, key)
    norms, recorded = run.of(keys.GRAD_NORM).finite, summary.get(keys.GRAD_NORM)
    for name, point in PERCENTILES.items():
        norm = drawn(recorded.get(name)) if isinstance(recorded, dict) else None
        if norm is None and len(norms):
            norm = float(np.percentile(norms, point))
        found[f"{keys.GRAD_NORM}/{name}"] = norm
    wall = drawn(summary.get(keys.WALL_SECONDS))
    return found | {
        keys.CLIP_FRACTION: drawn(summary.get(keys.CLIP_FRACTION)) if run.info.parts else None,
        keys.CLIP_COEF: float(coef.mean()) if len(coef) else None,
        DIVERGED: run.diverged_at,
        "steps": run.steps or None,
        "seconds": elapsed(run.status) if wall is None else wall,
    }


def _best(run: Run, key: str, higher: bool, final: float | None) -> float | None:
    # The summary keeps the best value of the metric's usual direction.
    recorded = run.summary.get("best") if higher == higher_is_better(key) else None
    best = drawn(recorded.get(key)) if isinstance(recorded, dict) else None
    finite = run.of(key).finite
    if best is None and len(finite):
        best = float(finite.max() if higher else finite.min())
    lost = len(run.of(key)) or (final is not None and math.isnan(final))
    return math.nan if best is None and lost else best


def _last(run: Run, record: object, key: str) -> float | None:
    """Return the number of a record if it has one, else the last one of the rows."""
    value = drawn(record.get(key)) if isinstance(record, Mapping) else None
    rows = run.of(key).values
    return float(rows[-1]) if value is None and len(rows) else value


def drawn(value: object) -> float | None:
    """Return a number of a record as a chart or a mean can use it; None if it is none."""
    found = number(value)
    return None if found is None else float(_drawn([found])[0])


def _drawn(values: list[float]) -> Floats:
    """Return numbers without those whose square or ratio leaves the range of a float."""
    array = np.asarray(values, dtype=np.float64)
    size = np.abs(array)
    array[size > 1e150] *= np.inf
    array[size < 1e-150] *= 0.0
    return array


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (files.STATUS, files.ROWS))


def read_run(folder: Path) -> Run:
    """Read the folder of a run, of which any file may be missing or incomplete."""
    if not folder.is_dir():
        raise NoRunError(f"{folder}: no such folder")
    status = read_object(folder / files.STATUS)
    composed = folder / files.HYDRA / files.CONFIG
    overrides = read_yaml(folder / files.OVERRIDES)
    return Run(
        folder=folder,
        number=folder.name,
        state=state_of(status),
        error=str(status["error"]) if status.get("error") else None,
        config=flat(read_yaml(folder / files.CONFIG)) or flat(read_yaml(composed)),
        overrides=tuple(map(str, overrides)) if isinstance(overrides, list) else (),
        series=read_series(folder / files.ROWS),
        summary=read_object(folder / files.SUMMARY),
        status=status,
    )


# libyaml, if PyYAML was built with it, is ten times as fast: a large sweep has 256 runs.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> object:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def flat(record: object, prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration by dotted key; a list is one value."""
    if not isinstance(record, dict):
        return {}
    found: dict[str, Any] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def read_series(path: Path) -> dict[str, Series]:
    """Read all series of a file of rows; empty if the file is missing."""
    columns: dict[str, tuple[list[float], list[float]]] = {}
    for row in read_rows(path):
        step = row.get(keys.TRAIN_STEP, math.nan)
        if type(step) not in (int, float) or not math.isfinite(step):
            continue
        for key, value in row.items():
            if type(value) is float or type(value) is int:
                steps, values = columns.setdefault(key, ([], []))
                steps.append(step)
                values.append(value)
    return {key: _series(*column) for key, column in columns.items()}


def _series(steps: list[float], values: list[float]) -> Series:
    at, of = _drawn(steps), _drawn(values)
    if np.all(np.diff(at) > 0):
        return Series(at, of)
    # np.unique keeps the first of equal steps: in reversed order, the row written last.
    unique, first = np.unique(at[::-1], return_index=True)
    return Series(unique, of[::-1][first])
