"""One run, as its folder tells it."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from runner.report.series import EMPTY, Series, read_series
from runner.run_folder import files, keys
from runner.run_folder.strict_json import number, read_object

try:
    # Of libyaml where PyYAML has it: ten times as fast, which 256 configurations notice.
    from yaml import CSafeLoader as _Loader
except ImportError:  # pragma: no cover - depends on how PyYAML was built
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]


class NoRunError(Exception):
    """A folder that is missing, or holds neither a run nor a sweep."""


@dataclass(frozen=True)
class Run:
    """One training job.

    Attributes:
        folder: where it lies; None where it was planned and never began.
        number: its number in the sweep, or the folder's name.
        state: running, finished, failed, interrupted, killed (says running, but its process is
            gone), not started, or unknown.
        error: the cause of a failure, as recorded.
        config: dotted key to value, resolved.
        overrides: the words that make this run.
        series: metrics by key.
        summary: what ``summary.json`` holds; empty where the run never wrote one.
        status: what ``status.json`` holds.
    """

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
        """Key to value of the words that make this run."""
        pairs = (word.lstrip("+~").split("=", 1) for word in self.overrides if "=" in word)
        return {key.partition("@")[0]: value for key, value in pairs}

    @property
    def mode(self) -> str:
        """The clipping mode; empty where neither configuration nor words tell."""
        if self.config:
            return str(self.config.get("clip.mode") or "")
        return self.typed.get("clip", "")

    @property
    def threshold(self) -> float | None:
        """λ as configured, or as typed where there is no configuration; None for none."""
        if self.mode == "none":
            return None
        known = self.config or self.typed
        return _positive(known.get("clip.threshold"))

    def of(self, key: str) -> Series:
        """The series of a key, empty where the run recorded none."""
        return self.series.get(key, EMPTY)

    @cached_property
    def steps(self) -> int:
        """Optimizer steps taken, as far as is known."""
        known = [self.summary.get("steps"), self.status.get("step")]
        known += [one.steps[-1] for key, one in self.series.items() if len(one)][:1]
        return int(max((value for value in known if isinstance(value, int | float)), default=0))

    @cached_property
    def seconds(self) -> float | None:
        """Wall time, from the summary or from when the run began and ended."""
        wall = number(self.summary.get(keys.WALL_SECONDS))
        if wall is not None:
            return wall
        began, ended = (_moment(self.status.get(key)) for key in ("started", "ended"))
        return (ended - began).total_seconds() if began and ended else None


def is_run(folder: Path) -> bool:
    """Whether a folder holds the record of one run."""
    return any((folder / name).exists() for name in (files.STATUS, files.ROWS))


def read_run(folder: Path) -> Run:
    """Read a run folder. Files that are missing, or were only half written, are done without.

    Raises:
        NoRunError: the folder is missing.
    """
    if not folder.is_dir():
        raise NoRunError(f"{folder}: no such folder")
    status = read_object(folder / files.STATUS)
    config = _config(folder)
    objective = config.get("sweep.objective")
    extra = frozenset({objective}) if isinstance(objective, str) else frozenset()
    return Run(
        folder=folder,
        number=folder.name,
        state=_state(status),
        error=_text(status.get("error")),
        config=config,
        overrides=_overrides(folder),
        series=read_series(folder / files.ROWS, extra),
        summary=read_object(folder / files.SUMMARY),
        status=status,
    )


def read_yaml(path: Path) -> object:
    """What a YAML file holds; None where it is missing or damaged."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def flat(record: object, prefix: str = "") -> dict[str, Any]:
    """A nested configuration as dotted keys; lists are values."""
    if not isinstance(record, dict):
        return {}
    keys: dict[str, Any] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            keys |= flat(value, f"{name}.")
        else:
            keys[name] = value
    return keys


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that ended and was not reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    try:
        # After the name, which may itself hold blanks and brackets, comes the state.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[:1] not in (["Z"], ["X"])


def _state(status: Mapping[str, Any]) -> str:
    state = str(status.get("state") or "unknown")
    pid, host = status.get("pid"), status.get("host")
    here = isinstance(pid, int) and pid > 0 and host in (None, socket.gethostname())
    return "killed" if state == "running" and here and not is_alive(int(pid or 0)) else state


def _config(folder: Path) -> dict[str, Any]:
    for name in (files.CONFIG, f"{files.HYDRA}/{files.CONFIG}"):
        config = flat(read_yaml(folder / name))
        if config:
            return config
    return {}


def _overrides(folder: Path) -> tuple[str, ...]:
    words = read_yaml(folder / files.OVERRIDES)
    return tuple(str(word) for word in words) if isinstance(words, list) else ()


def _positive(value: object) -> float | None:
    try:
        threshold = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return threshold if threshold > 0 and math.isfinite(threshold) else None


def _text(value: object) -> str | None:
    return str(value) if value else None


def _moment(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    # Naive and aware times cannot be subtracted from each other.
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
