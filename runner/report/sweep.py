"""All runs of a sweep, or the one run of a run folder, as one collection to report on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.report.run import NoRunError, Run, is_run, read_run, read_yaml
from runner.run_folder import files
from runner.run_folder.strict_json import read_object


@dataclass(frozen=True)
class SweepRuns:
    """What one page reports on.

    Attributes:
        folder: where the page is written, and what its links are relative to.
        name: heading of the page.
        runs: in the order of their numbers.
        single: whether the folder is that of one run, not of a sweep.
        command: what was typed, where it is known.
        record: what ``sweep.json`` holds; empty for one run.
    """

    folder: Path
    name: str
    runs: tuple[Run, ...]
    single: bool = False
    command: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


def read(folder: Path) -> SweepRuns:
    """Read whatever ``folder`` is: one run, or a sweep of any number of runs, none included.

    Raises:
        NoRunError: the folder is missing, or is neither.
    """
    if not folder.is_dir():
        raise NoRunError(f"{folder}: no such folder")
    folder = folder.resolve()
    if is_run(folder):
        run = read_run(folder)
        command = shlex.join(["python", "-m", "runner", *run.overrides])
        return SweepRuns(folder, folder.name, (run,), single=True, command=command)
    return read_sweep(folder)


def read_sweep(folder: Path) -> SweepRuns:
    """Read a sweep folder: its numbered sub-folders, and what ``sweep.json`` adds to them.

    The run folders are the truth. ``sweep.json`` may be missing, or older than they are; it tells
    what was planned and never began.

    Raises:
        NoRunError: no numbered sub-folder, and no record of a sweep.
    """
    found = sorted(
        (entry for entry in folder.iterdir() if entry.name.isdecimal() and entry.is_dir()),
        key=lambda entry: int(entry.name),
    )
    marked = any((folder / name).exists() for name in (files.SWEEP, files.MULTIRUN))
    if not marked and not any(is_run(entry) or (entry / files.HYDRA).is_dir() for entry in found):
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
    runs = [_known(read_run(entry), planned.get(entry.name, {})) for entry in found]
    present = {run.number for run in runs}
    runs += [_planned(entry) for key, entry in planned.items() if key not in present]
    runs.sort(key=lambda run: (not run.number.isdecimal(), run.number.zfill(9)))
    name = record.get("name")
    return SweepRuns(
        folder,
        str(name) if name else folder.name,
        tuple(runs),
        command=_command(folder, record),
        record=record,
    )


def _known(run: Run, entry: Mapping[str, Any]) -> Run:
    """A run whose own record is cut short, completed from the sweep's."""
    words = entry.get("overrides")
    if not run.overrides and isinstance(words, list):
        run = replace(run, overrides=tuple(str(word) for word in words))
    if run.state == "unknown":
        # A process that ended before it recorded anything leaves its cause with the sweep alone.
        state, error = entry.get("state"), entry.get("error")
        run = replace(run, state=str(state or "unknown"), error=str(error) if error else None)
    return run


def _planned(entry: Mapping[str, Any]) -> Run:
    words, state = entry.get("overrides"), entry.get("state")
    error = entry.get("error")
    return Run(
        folder=None,
        number=str(entry.get("number")),
        state=str(state) if state in ("failed", "interrupted") else "not started",
        error=str(error) if error else None,
        overrides=tuple(str(word) for word in words) if isinstance(words, list) else (),
    )


def _command(folder: Path, record: Mapping[str, Any]) -> str | None:
    words = record.get("words")
    if isinstance(words, list):
        return shlex.join(["python", "-m", "runner", *map(str, words)])
    multirun = read_yaml(folder / files.MULTIRUN)
    try:
        task = multirun["hydra"]["overrides"]["task"]  # type: ignore[index]
    except (KeyError, TypeError):
        return None
    return shlex.join(["python", "-m", "runner", "-m", *map(str, task)])
