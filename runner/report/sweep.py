"""Read the folder of a sweep, or of one run, as a collection of runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.config.folders import CONFIG_NAME, find
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
        flags: flags of it that say where the configuration was read, such as ``--config-dir``.
    """

    folder: Path
    name: str
    runs: tuple[Run, ...]
    single: bool = False
    command: str | None = None
    flags: tuple[str, ...] = ()

    def command_of(self, run: Run) -> str:
        """Return the command that runs one of the runs."""
        return command_of([*self.flags, *run.overrides])


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
        flags = _flags(read_yaml(folder / files.COMPOSED))
        command = command_of([*flags, *run.overrides])
        return SweepRuns(folder, folder.name, (run,), True, command, flags)
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
    composed = read_yaml(folder / files.MULTIRUN)
    flags = _flags(composed)
    name = folder.name if record is None else record.name
    command = _composed_command(composed, flags) if record is None else command_of(record.words)
    return SweepRuns(folder, name, tuple(runs), command=command, flags=flags)


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


def _composed_command(composed: Any, flags: Iterable[str]) -> str | None:
    """Return the command of a sweep from what Hydra wrote; None if it wrote nothing."""
    try:
        return command_of(["-m", *flags, *composed["hydra"]["overrides"]["task"]])
    except (KeyError, TypeError):
        return None


def _flags(composed: Any) -> tuple[str, ...]:
    """Return the flags that say where Hydra read the configuration, from what it wrote."""
    try:
        sources = composed["hydra"]["runtime"]["config_sources"]
        paths = {one["provider"]: Path(one["path"]) for one in sources if one["schema"] == "file"}
        name = composed["hydra"]["job"]["config_name"]
    except (KeyError, TypeError):
        return ()
    given = {
        "--config-path": _briefly(paths.get("main"), find("conf")),
        "--config-name": None if name == CONFIG_NAME else name,
        "--config-dir": _briefly(paths.get("command-line"), None),
    }
    return tuple(word for flag, text in given.items() if text for word in (flag, text))


def _briefly(folder: Path | None, usual: Path | None) -> str | None:
    """Return a folder as a command here names it; None for the usual one."""
    if folder is None or folder == usual:
        return None
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
