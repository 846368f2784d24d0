"""Read the folder of one run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from runner.config.modes import ModeInfo, info_of
from runner.report.series import EMPTY, Series, drawn, read_series
from runner.run_folder import files, keys
from runner.run_folder.status import elapsed, state_of
from runner.run_folder.strict_json import read_object


class NoRunError(Exception):
    """A folder is missing, or holds neither a run nor a sweep."""


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
        """Value of each override by its key."""
        pairs = (word.lstrip("+~").split("=", 1) for word in self.overrides if "=" in word)
        return {key.partition("@")[0]: value for key, value in pairs}

    @property
    def seed(self) -> str:
        """Seed, by which settings are compared; the number of the run if it has none."""
        seed = self.config.get("seed", self.typed.get("seed"))
        return f"run {self.number}" if seed is None else str(seed)

    @property
    def mode(self) -> str:
        """Clipping mode; empty if neither configuration nor overrides give it."""
        if self.config:
            return str(self.config.get("clip.mode") or "")
        return self.typed.get("clip", "")

    @cached_property
    def info(self) -> ModeInfo:
        """Facts about the clipping mode, as the run recorded them if the mode is a user's own."""
        recorded = self.summary.get(keys.CLIP_MODE)
        return info_of(self.mode, recorded if isinstance(recorded, dict) else None)

    @property
    def threshold(self) -> float | None:
        """Configured λ, or the override if there is no configuration; None without clipping."""
        if self.info.clips is None:
            return None
        try:
            threshold = drawn(float((self.config or self.typed).get("clip.threshold")))  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            return None
        return threshold if threshold and 0 < threshold < math.inf else None

    def of(self, key: str) -> Series:
        """Return the series of a metric, which is empty if the run did not record it."""
        return self.series.get(key, EMPTY)

    @cached_property
    def steps(self) -> int:
        """Optimizer steps taken, as far as they were recorded."""
        known = [drawn(self.summary.get("steps")), drawn(self.status.get("step"))]
        known += [float(one.steps[-1]) for one in self.series.values() if len(one)][:1]
        return int(max((value for value in known if value and math.isfinite(value)), default=0))

    @cached_property
    def seconds(self) -> float | None:
        """Wall time from the summary, or else between the recorded start and end."""
        wall = drawn(self.summary.get(keys.WALL_SECONDS))
        return elapsed(self.status) if wall is None else wall


def unreadable(folder: Path | None, number: str, error: Exception) -> Run:
    """Return what is shown in place of a run whose files hold something that nobody foresaw."""
    cause = f"its files cannot be read: {type(error).__name__}: {error}"
    return Run(folder=folder, number=number, state="unreadable", error=cause)


def is_run(folder: Path) -> bool:
    """Return whether a folder holds the record of one run."""
    return any((folder / name).exists() for name in (files.STATUS, files.ROWS))


def read_run(folder: Path) -> Run:
    """Read the folder of a run, of which any file may be missing or incomplete."""
    if not folder.is_dir():
        raise NoRunError(f"{folder}: no such folder")
    status = read_object(folder / files.STATUS)
    composed = folder / files.HYDRA / files.CONFIG
    config = flat(read_yaml(folder / files.CONFIG)) or flat(read_yaml(composed))
    overrides = read_yaml(folder / files.OVERRIDES)
    return Run(
        folder=folder,
        number=folder.name,
        state=state_of(status),
        error=str(status["error"]) if status.get("error") else None,
        config=config,
        overrides=tuple(map(str, overrides)) if isinstance(overrides, list) else (),
        series=read_series(folder / files.ROWS, [str(config.get("sweep.objective"))]),
        summary=read_object(folder / files.SUMMARY),
        status=status,
    )


# libyaml, if PyYAML was built with it, is ten times as fast: a large sweep has 256 runs.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> object:
    """Return the content of a YAML file; None if it is missing or damaged."""
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
