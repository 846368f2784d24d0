"""Whether a folder already holds something other than the run or sweep that is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from runner.run_folder import files
from runner.run_folder.status import is_unfinished
from runner.run_folder.sweep_record import SweepRecord


def earlier_record(
    folder: Path, request: str | None = None, jobs: Sequence[str] = ()
) -> str | None:
    """Return why a run or a sweep must not be written to ``folder``, or None if it may be."""
    if folder.exists() and not folder.is_dir():
        return f"{folder} is not a folder; remove it"
    if request is not None:
        return _other_sweep(folder, request, jobs)
    if is_unfinished(folder):
        return None  # the run continues it, or is refused where its configuration is known
    if (folder / files.LOCK).exists() and not (folder / files.STATUS).exists():
        return None  # a run that was killed before its record began
    for name in (files.STATUS, files.MULTIRUN, files.HYDRA):
        if (folder / name).exists():
            return f"holds the record of an earlier run ({name}); choose another name or remove it"
    return None


def _other_sweep(folder: Path, request: str, jobs: Sequence[str]) -> str | None:
    try:
        record = SweepRecord.find(folder)
    except (OSError, ValueError) as error:
        return f"{error}; choose another sweep.name or remove {folder}"
    if record is None:
        # A sweep that ended before it wrote anything leaves its lock files.
        if not folder.is_dir() or all(one.suffix == ".lock" for one in folder.iterdir()):
            return None
        return f"{folder} holds something that is no sweep; choose another sweep.name or remove it"
    known = Counter(entry.config_hash for entry in record.entries)
    extended = 0 < record.total == len(record.entries) and known <= Counter(jobs)
    if record.request == request or extended:
        return None
    command = " ".join(record.words) or "of an unknown command"
    return f"{folder} holds another request ({command}); choose another sweep.name"
