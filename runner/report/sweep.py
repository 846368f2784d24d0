"""Read the folder of a sweep, or of one run, as a collection of runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from runner.report.run import NoRunError, Run, is_run, read_run, read_yaml, unreadable
from runner.run_folder import files
from runner.run_folder.sweep_record import Entry, SweepRecord


@dataclass(frozen=True)
class SweepRuns:
    """The runs of one page.

    Attributes:
        folder: folder of the page; links in the page are relative to it.
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
    record = _record(folder)
    planned = {str(entry.number): entry for entry in record.entries} if record else {}
    runs = [_completed(_read(one), planned.pop(one.name, None)) for one in found]
    runs += [_planned(entry) for entry in planned.values()]
    runs.sort(key=lambda run: int(run.number))
    if record is None:
        return SweepRuns(folder, folder.name, tuple(runs), command=_composed_command(folder))
    return SweepRuns(folder, record.name, tuple(runs), command=command_of(record.words))


def command_of(overrides: Iterable[object]) -> str:
    """Return the command that runs ``overrides``."""
    return shlex.join(["python", "-m", "runner", *map(str, overrides)])


def _record(folder: Path) -> SweepRecord | None:
    """Return the record of a sweep; None if it is missing or damaged."""
    try:
        return SweepRecord.find(folder)
    except (OSError, ValueError):
        return None


def _read(folder: Path) -> Run:
    """Read a run of a sweep; one that cannot be read must not take the page of the others."""
    try:
        return read_run(folder)
    except Exception as error:
        return unreadable(folder, folder.name, error)


def _completed(run: Run, entry: Entry | None) -> Run:
    """Add what the sweep recorded about a run whose own record is incomplete."""
    if entry is None:
        return run
    if not run.overrides:
        run = replace(run, overrides=tuple(entry.overrides))
    if run.state == "unknown":
        # The sweep alone records the cause if a process ended before it wrote anything.
        run = replace(run, state=entry.state, error=entry.error)
    return run


def _planned(entry: Entry) -> Run:
    return Run(
        folder=None,
        number=str(entry.number),
        state=entry.state if entry.state in ("failed", "interrupted") else "not started",
        error=entry.error,
        overrides=tuple(entry.overrides),
    )


def _composed_command(folder: Path) -> str | None:
    """Return the command of a sweep from what Hydra wrote; None if it wrote nothing."""
    multirun = read_yaml(folder / files.MULTIRUN)
    try:
        return command_of(["-m", *multirun["hydra"]["overrides"]["task"]])  # type: ignore[index]
    except (KeyError, TypeError):
        return None
