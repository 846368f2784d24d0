"""Read the folder of a sweep, or of one run, as a collection of runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.report.run import NoRunError, Run, is_run, read_run, read_yaml
from runner.run_folder import files
from runner.run_folder.strict_json import read_object


@dataclass(frozen=True)
class SweepRuns:
    """The runs of one page.

    Attributes:
        folder: folder of the page, which its links are relative to.
        name: heading of the page.
        runs: runs by number.
        single: whether the folder is that of one run, not of a sweep.
        command: command that started them, if it was recorded.
    """

    folder: Path
    name: str
    runs: tuple[Run, ...]
    single: bool = False
    command: str | None = None


def read(folder: Path) -> SweepRuns:
    """Read the folder of one run, or of a sweep of any number of runs, which may be none.

    Raises:
        NoRunError: the folder is missing, or is neither.
    """
    if not folder.is_dir():
        raise NoRunError(f"{folder}: no such folder")
    folder = folder.resolve()
    if is_run(folder):
        run = read_run(folder)
        return SweepRuns(folder, folder.name, (run,), True, command_of(run.overrides))
    return read_sweep(folder)


def read_sweep(folder: Path) -> SweepRuns:
    """Read the numbered folders of a sweep, and what ``sweep.json`` adds to them.

    The folders of the runs take precedence: ``sweep.json`` may be missing or older. It also lists
    the runs that were planned but never started.

    Raises:
        NoRunError: there is neither a numbered folder nor a record of a sweep.
    """
    found = [one for one in folder.iterdir() if one.name.isdecimal() and one.is_dir()]
    marked = any((folder / name).exists() for name in (files.SWEEP, files.MULTIRUN))
    if not marked and not any(is_run(one) or (one / files.HYDRA).is_dir() for one in found):
        raise NoRunError(
            f"{folder}: holds no run (a run's folder has {files.STATUS}; "
            f"a sweep's has numbered folders or {files.SWEEP})"
        )
    record = read_object(folder / files.SWEEP)
    listed = record.get("runs")
    planned = {
        str(entry.get("number")): entry
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict)
    }
    runs = [_completed(read_run(one), planned.pop(one.name, {})) for one in found]
    runs += [_planned(number, entry) for number, entry in planned.items()]
    runs.sort(key=lambda run: (not run.number.isdecimal(), run.number.zfill(9)))
    name = str(record.get("name") or folder.name)
    return SweepRuns(folder, name, tuple(runs), command=_typed(folder, record))


def command_of(overrides: Iterable[object]) -> str:
    """Return the command that runs ``overrides``."""
    return shlex.join(["python", "-m", "runner", *map(str, overrides)])


def _completed(run: Run, entry: Mapping[str, Any]) -> Run:
    """Add what the sweep recorded about a run whose own record is incomplete."""
    if not run.overrides:
        run = replace(run, overrides=_overrides(entry))
    if run.state == "unknown":
        # The sweep alone records the cause if a process ended before it wrote anything.
        run = replace(run, state=str(entry.get("state") or "unknown"), error=_error(entry))
    return run


def _planned(number: str, entry: Mapping[str, Any]) -> Run:
    state = entry.get("state")
    return Run(
        folder=None,
        number=number,
        state=str(state) if state in ("failed", "interrupted") else "not started",
        error=_error(entry),
        overrides=_overrides(entry),
    )


def _overrides(entry: Mapping[str, Any]) -> tuple[str, ...]:
    words = entry.get("overrides")
    return tuple(map(str, words)) if isinstance(words, list) else ()


def _error(entry: Mapping[str, Any]) -> str | None:
    return str(entry["error"]) if entry.get("error") else None


def _typed(folder: Path, record: Mapping[str, Any]) -> str | None:
    words = record.get("words")
    if isinstance(words, list):
        return command_of(words)
    multirun = read_yaml(folder / files.MULTIRUN)
    try:
        return command_of(["-m", *multirun["hydra"]["overrides"]["task"]])  # type: ignore[index]
    except (KeyError, TypeError):
        return None
