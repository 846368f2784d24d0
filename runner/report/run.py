"""Read the folder of a run, or of a sweep: records, rows as one series a key, and metrics."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from runner.config.identity import branching
from runner.config.masking import masked, masked_words
from runner.config.modes import ModeInfo, info_of
from runner.config.reading import yaml_of
from runner.run_folder import files, keys
from runner.run_folder.divergence import diverged_from
from runner.run_folder.status import Entry, SweepRecord, state_of
from runner.run_folder.strict_json import number, read_object, read_rows

Floats = NDArray[np.float64]


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
        """The values that are neither NaN nor infinite."""
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
        """Overrides of the run: the text of each value by its key."""
        pairs = (word.lstrip("+~").split("=", 1) for word in self.overrides if "=" in word)
        return {key.partition("@")[0]: value for key, value in pairs}

    @property
    def seed(self) -> str:
        """Seed, or the number of a run without one."""
        seed = self.config.get("seed", self.typed.get("seed"))
        return f"run {self.number}" if seed is None else str(seed)

    @property
    def has_seed(self) -> bool:
        """Whether the seed is known."""
        return not self.seed.startswith("run ")

    @property
    def mode(self) -> str:
        """Name of the clipping mode; empty if nothing tells it."""
        mode = self.config.get("clip.mode") if self.config else self.typed.get("clip")
        return str(mode or "")

    @cached_property
    def info(self) -> ModeInfo:
        """Facts about the clipping mode, as the run recorded them of a user's own."""
        recorded = self.summary.get(keys.CLIP_MODE)
        return info_of(self.mode, recorded if isinstance(recorded, dict) else None)

    @property
    def threshold(self) -> float | None:
        """Configured or typed λ; None without clipping."""
        size, _ = natural(str((self.config or self.typed).get("clip.threshold")))
        return size if self.info.clips is not None and 0 < size < math.inf else None

    def of(self, key: str) -> Series:
        """Return the series of a metric, which is empty if the run has none."""
        return self.series.get(key, EMPTY)

    def recorded(self, key: str) -> bool:
        """Return whether rows or the summary have a metric."""
        final = self.summary.get("final")
        return key in self.series or (isinstance(final, dict) and key in final)

    def by_suffix(self, prefix: str) -> dict[str, Series]:
        """Return the series whose keys have a prefix, by the keys without it."""
        by_suffix: dict[str, Series] = {}
        for key, series in self.series.items():
            if key.startswith(prefix):
                by_suffix[key.removeprefix(prefix)] = series
        return by_suffix

    @cached_property
    def steps(self) -> int:
        """Number of steps that the run has taken, by its summary, its status or its rows."""
        counts = [number(self.summary.get("steps")), number(self.status.get("step"))]
        counts += self.of(keys.TRAIN_STEP).steps[-1:].tolist()
        return int(max((count for count in counts if count and math.isfinite(count)), default=0))

    @cached_property
    def diverged_at(self) -> int | None:
        """Step from which the training loss was lost until the end, as recorded or from rows."""
        recorded = self.summary.get(keys.DIVERGED)
        if keys.DIVERGED in self.summary:
            return recorded if type(recorded) is int else None
        loss = self.of(keys.TRAIN_LOSS)
        position = diverged_from(loss.values.tolist())
        if position is None and self.state == "failed" and len(loss):
            # What ended a run that failed may be its last loss alone.
            lost = ~np.isfinite(loss.values)
            position = len(loss) - 1 if lost[-1] else None
        return None if position is None else int(loss.steps[position])

    @cached_property
    def branch(self) -> tuple[str, int] | None:
        """Run and step at which this one begins, if it continues another one: ``RUN@STEP``."""
        return branching(str(self.config.get("resume.from")))

    @property
    def own_loop(self) -> bool:
        """Whether the rows come from somebody's own loop, which no command of ours made."""
        return not self.status and not self.overrides


def natural(text: str) -> tuple[float, str]:
    """Return what texts are sorted by: numbers by their size, before all other texts."""
    try:
        return float(text), ""
    except ValueError:
        return math.inf, text


def is_run(folder: Path) -> bool:
    """Return whether a folder holds the status or the rows of a run."""
    return any((folder / name).exists() for name in (files.STATUS, files.ROWS))


def read_run(folder: Path, entry: Entry | None = None) -> Run:
    """Read a run's folder, of which any file may be missing, with what its sweep has recorded."""
    status = read_object(folder / files.STATUS)
    if entry is not None and not status:  # it ended before it wrote anything
        status = {"state": entry.state, "error": entry.error}
    composed = folder / files.HYDRA / files.CONFIG
    overrides = read_yaml(folder / files.OVERRIDES)
    words = overrides if isinstance(overrides, list) else entry.words if entry else ()
    series = read_series(folder / files.ROWS)
    recorded = read_yaml(folder / files.CONFIG) or read_yaml(composed)
    config = flat(masked(recorded))
    return Run(
        folder=folder,
        number=folder.name,
        state=state_of(status),
        error=str(status["error"]) if status.get("error") else None,
        config=config if status or overrides else _clipping(series) | config,
        overrides=tuple(masked_words([str(word) for word in words])),
        series=series,
        summary=read_object(folder / files.SUMMARY),
        status=status,
    )


def _clipping(series: Mapping[str, Series]) -> dict[str, Any]:
    """Return what the rows of somebody's own loop, which has no configuration, tell of clipping."""
    before = series.get(keys.GRAD_NORM, EMPTY)
    after = series.get(keys.GRAD_NORM_CLIPPED, EMPTY)
    limit = series.get(keys.CLIP_THRESHOLD, EMPTY).finite
    if not len(limit) or len(before) != len(after):
        return {"clip.mode": "none"}
    if np.ptp(limit):
        return {"clip.mode": "own"}
    finite = np.isfinite(before.values)  # other steps were skipped, or taken as they were
    by_norm = np.minimum(before.values[finite], limit[0])
    same = np.allclose(after.values[finite], by_norm, rtol=1e-4, equal_nan=True)
    return {"clip.mode": "norm" if same else "own", "clip.threshold": float(limit[0])}


# libyaml, if PyYAML was built with it, is ten times as fast: a large sweep has 256 runs.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> object:
    """Return the content of a YAML file; None if it is missing or cannot be read."""
    try:
        return yaml.load(yaml_of(path).decode("utf-8"), Loader=_LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def flat(record: object, prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration by dotted key; a list is one value."""
    if not isinstance(record, dict):
        return {}
    flattened: dict[str, Any] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        nested = flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
        flattened |= nested
    return flattened


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


def _series(recorded_steps: list[float], recorded_values: list[float]) -> Series:
    steps = np.asarray(recorded_steps, np.float64)
    values = np.asarray(recorded_values, np.float64)
    # Squares and ratios of these would leave the range of a float.
    values[np.abs(values) > 1e150] *= np.inf
    values[np.abs(values) < 1e-150] *= 0.0
    if np.all(np.diff(steps) > 0):
        return Series(steps, values)
    # np.unique keeps the first of equal steps: in reversed order, the row written last.
    unique, first = np.unique(steps[::-1], return_index=True)
    return Series(unique, values[::-1][first])


@dataclass(frozen=True)
class SweepRuns:
    """The runs of one page."""

    folder: Path
    name: str
    runs: tuple[Run, ...]
    single: bool = False
    command: str | None = None
    flags: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    baseline: str | None = None

    @property
    def searches(self) -> bool:
        """Whether a sweeper chose the runs one after another, such as Optuna's."""
        return any(word.lstrip("+").startswith("hydra/sweeper=") for word in self.words)

    def command_with(self, seeds: Sequence[int]) -> str:
        """Return the command that runs the sweep with these seeds and keeps the runs it has."""
        kept = [word for word in self.words if not word.startswith(("seed=", "sweep.name="))]
        counted = len(seeds) > 8 and [*seeds] == [*range(len(seeds))]
        seeded = f"range({len(seeds)})" if counted else ",".join(map(str, seeds))
        seeded = f"seed={seeded}"
        swept = [] if "-m" in kept or "--multirun" in kept else ["-m"]
        return command_of([*swept, *kept, seeded, f"sweep.name={self.name}"]) if kept else seeded

    def command_for(self, key: str, values: Sequence[str]) -> str:
        """Return the command of the sweep with other values of a key, under a name of its own."""
        added = f"{key}={','.join(values)}"
        if not self.words:
            return added
        apart = (f"{key}=", "sweep.name=", "seed=range(")
        kept = [word for word in self.words if not word.startswith(apart)]
        seeds = [word for word in self.words if word.startswith("seed=range(")]
        swept = [] if "-m" in kept or "--multirun" in kept else ["-m"]
        return command_of([*swept, *kept, *seeds, added])

    def command_of(self, run: Run) -> str:
        """Return the command that repeats a run."""
        return command_of([*self.flags, *run.overrides])


def read(folder: Path) -> SweepRuns:
    """Read the folder of one run, or of a sweep, which may have no run yet."""
    if not os.path.isdir(folder):
        raise NoRunError(f"{folder}: no such folder")
    folder = folder.resolve()
    if is_run(folder):
        run = read_run(folder)
        flags = _flags(read_yaml(folder / files.COMPOSED))
        return SweepRuns(
            folder=folder,
            name=folder.name,
            runs=(run,),
            single=True,
            command=None if run.own_loop else command_of([*flags, *run.overrides]),
            flags=flags,
        )
    return read_sweep(folder)


def read_sweep(folder: Path) -> SweepRuns:
    """Read the folders of a sweep's runs, and what ``sweep.json`` adds to them."""
    folders = _folders_of_runs(folder)
    record = None
    with suppress(OSError, ValueError):  # a damaged record is like none
        record = SweepRecord.find(folder)
    planned = {str(entry.number): entry for entry in record.entries} if record else {}
    runs = [read_run(path, planned.pop(path.name, None)) for path in folders]
    runs += [_without_folder(entry) for entry in planned.values()]
    runs.sort(key=lambda run: natural(run.number))
    flags = _flags(read_yaml(folder / files.MULTIRUN))
    if record is None:
        return SweepRuns(folder, folder.name, tuple(runs), flags=flags)
    return SweepRuns(
        folder=folder,
        name=record.name,
        runs=tuple(runs),
        command=command_of(record.words),
        flags=flags,
        words=tuple(record.words),
    )


def _folders_of_runs(folder: Path) -> list[Path]:
    """Return the folders of a sweep that hold a run, or are made for one."""
    folders = [path for path in folder.iterdir() if path.is_dir()]
    if any((folder / name).exists() for name in (files.SWEEP, files.MULTIRUN)):
        return [path for path in folders if path.name.isdecimal()]
    folders = [path for path in folders if is_run(path) or (path / files.HYDRA).is_dir()]
    if not folders:
        raise NoRunError(
            f"{folder}: holds no run (a run's folder has {files.ROWS} or {files.STATUS}; "
            f"a sweep's has folders of runs, or {files.SWEEP})"
        )
    return folders


def _without_folder(entry: Entry) -> Run:
    """Return a run of which the record of the sweep alone knows."""
    return Run(
        folder=None,
        number=str(entry.number),
        state=entry.state if entry.state in ("failed", "interrupted") else "not started",
        error=entry.error,
        overrides=tuple(entry.words),
    )


def command_of(overrides: Iterable[object]) -> str:
    """Return the command with these overrides, quoted for a shell."""
    return shlex.join(["python", "-m", "runner", *(str(override) for override in overrides)])


def _flags(composed: Any) -> tuple[str, ...]:
    """Return the flag for a folder of the user's that Hydra read, from what it wrote."""
    try:
        sources = composed["hydra"]["runtime"]["config_sources"]
        paths = {
            source["provider"]: Path(source["path"])
            for source in sources
            if source["schema"] == "file"
        }
    except (KeyError, TypeError):
        return ()
    added = paths.get("command-line")
    return ("--config-dir", str(added)) if added else ()
