"""Find the runs of a sweep that are not finished yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path

from runner.compose.request import Request
from runner.run_folder import files, keys
from runner.run_folder.status import elapsed, objective_of
from runner.run_folder.strict_json import read_object
from runner.run_folder.sweep_record import Entry, SweepRecord


def plan_runs(request: Request) -> list[Entry]:
    """Return the runs of a sweep, each with the state in its folder; nothing is written.

    Runs that were recorded before keep their number and folder, in whatever order the overrides are
    given now: they are found by the hash of their configuration. A sweep whose sweeper chooses jobs
    by results has no runs before it starts.
    """
    sweep = request.sweep
    assert sweep is not None
    if sweep.trials is not None:
        return []
    record = SweepRecord.find(sweep.folder)
    before: dict[str, list[Entry]] = defaultdict(list)
    for entry in record.entries if record else ():
        before[entry.config_hash].append(entry)
    known = [before[job.hash].pop(0) if before[job.hash] else None for job in request.jobs]
    taken = {entry.number for entry in known if entry}
    free = (number for number in count() if number not in taken)
    objective = request.jobs[0].config.sweep.objective
    planned = []
    for job, old in zip(request.jobs, known, strict=True):
        number = old.number if old else next(free)
        folder = old.folder if old else str(number)
        words = [word for word in job.words if not _sets_hydra(word)]
        waiting = Entry(number, folder, list(job.apart), words, job.hash)
        entry = replace(waiting)
        load_status(entry, sweep.folder, objective)
        planned.append(entry if entry.state == "finished" else waiting)
    return sorted(planned, key=lambda entry: entry.number)


def load_status(entry: Entry, sweep: Path, objective: str) -> None:
    """Copy state and results from the folder of a run, if that folder holds this configuration."""
    folder = sweep / entry.folder
    status = read_object(folder / files.STATUS)
    if status.get("config_hash") != entry.config_hash:
        return
    entry.state = str(status.get("state"))
    entry.exit_code = status.get("exit_code")
    error = str(status.get("error") or "").strip().splitlines()
    entry.error = error[-1] if error else None
    seconds = elapsed(status)
    entry.seconds = None if seconds is None else round(seconds, 3)
    if entry.state == "finished":
        summary = read_object(folder / files.SUMMARY)
        entry.objective = objective_of(summary, objective)
        entry.clip_ratio = objective_of(summary, keys.CLIP_RATIO_TOTAL)


def archive(sweep: Path, folders: Iterable[str]) -> None:
    """Move old folders of runs that start again to ``earlier/<number>-<k>``."""
    for name in folders:
        folder = sweep / name
        if not folder.exists():
            continue
        home = sweep / files.EARLIER
        home.mkdir(exist_ok=True)
        free = (home / f"{name.replace('/', '-')}-{k}" for k in count(1))
        folder.rename(next(place for place in free if not place.exists()))


def _sets_hydra(word: str) -> bool:
    """Return whether an override sets a key of Hydra, which is the same for all jobs."""
    return word.lstrip("+~").startswith(("hydra.", "hydra/"))
