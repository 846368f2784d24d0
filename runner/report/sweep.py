"""Read the folder of a sweep, or of one run, as a collection of runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.config.folders import CONFIG_NAME, find
from runner.report.run import NoRunError, Run, is_run, read_run, read_yaml
from runner.run_folder import files
from runner.run_folder.status import Entry, SweepRecord


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

    def command_with(self, seeds: Iterable[object]) -> str:
        """Return the command that runs the sweep with these seeds and keeps the runs it has."""
        kept = [word for word in self.words if not word.startswith(("seed=", "sweep.name="))]
        seeded = f"seed={','.join(map(str, seeds))}"
        if not kept:
            return seeded
        swept = [] if "-m" in kept or "--multirun" in kept else ["-m"]
        return command_of([*swept, *kept, seeded, f"sweep.name={self.name}"])

    def command_of(self, run: Run) -> str:
        return command_of([*self.flags, *run.overrides])


def read(folder: Path) -> SweepRuns:
    """Read the folder of one run, or of a sweep of any number of runs, which may be none."""
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
    """Read the numbered folders of a sweep, and what ``sweep.json`` adds to them."""
    found = [one for one in folder.iterdir() if one.name.isdecimal() and one.is_dir()]
    marked = any((folder / name).exists() for name in (files.SWEEP, files.MULTIRUN))
    if not marked and not any(is_run(one) or (one / files.HYDRA).is_dir() for one in found):
        raise NoRunError(
            f"{folder}: holds no run (a run's folder has {files.STATUS}; "
            f"a sweep's has numbered folders or {files.SWEEP})"
        )
    record = None
    with suppress(OSError, ValueError):  # a damaged record is like none
        record = SweepRecord.find(folder)
    planned = {str(entry.number): entry for entry in record.entries} if record else {}
    runs = [_read(one, planned.pop(one.name, None)) for one in found]
    for entry in planned.values():
        state = entry.state if entry.state in ("failed", "interrupted") else "not started"
        words = tuple(entry.words)
        runs.append(Run(None, str(entry.number), state, entry.error, overrides=words))
    runs.sort(key=lambda run: int(run.number))
    flags = _flags(read_yaml(folder / files.MULTIRUN))
    if record is None:
        return SweepRuns(folder, folder.name, tuple(runs), flags=flags)
    words, command = tuple(record.words), command_of(record.words)
    return SweepRuns(folder, record.name, tuple(runs), False, command, flags, words)


def command_of(overrides: Iterable[object]) -> str:
    return shlex.join(["python", "-m", "runner", *map(str, overrides)])


def from_here(folder: Path) -> Path:
    """Return a folder as a command here names it."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _read(folder: Path, entry: Entry | None) -> Run:
    """Read a run of a sweep, with what the sweep recorded where its own record is incomplete."""
    try:
        run = read_run(folder)
    except Exception as error:  # it must not take the page of the others
        cause = f"its files cannot be read: {type(error).__name__}: {error}"
        return Run(folder, folder.name, "unreadable", cause)
    if entry is not None and not run.overrides:
        run = replace(run, overrides=tuple(entry.words))
    if entry is not None and run.state == "unknown":
        # The sweep alone records the cause if a process ended before it wrote anything.
        run = replace(run, state=entry.state, error=entry.error)
    return run


def _flags(composed: Any) -> tuple[str, ...]:
    """Return the flags that say where Hydra read the configuration, from what it wrote."""
    try:
        sources = composed["hydra"]["runtime"]["config_sources"]
        paths = {one["provider"]: Path(one["path"]) for one in sources if one["schema"] == "file"}
        name = composed["hydra"]["job"]["config_name"]
    except (KeyError, TypeError):
        return ()
    main, added = paths.get("main"), paths.get("command-line")
    given = {
        "--config-path": None if main in (None, find("conf")) else from_here(main),
        "--config-name": None if name == CONFIG_NAME else name,
        "--config-dir": added and from_here(added),
    }
    return tuple(str(word) for pair in given.items() if pair[1] for word in pair)
