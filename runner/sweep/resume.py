"""Find the runs of a sweep that are not finished yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from runner.compose.request import Request
from runner.run_folder import files, keys
from runner.run_folder.objective import objective_of
from runner.run_folder.state import elapsed
from runner.run_folder.strict_json import read_object
from runner.sweep.record import Entry, SweepRecord


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
    before: dict[str, list[Entry]] = defaultdict(list)
    for entry in recorded(sweep.folder):
        before[entry.config_hash].append(entry)
    made = []
    homeless = []
    for job in request.jobs:
        own = [word for word in job.words if not _is_hydras(word)]
        entry = Entry(-1, "", list(job.apart), own, job.hash)
        if before[job.hash]:
            known = before[job.hash].pop(0)
            entry.number, entry.folder = known.number, known.folder
        else:
            homeless.append(entry)
        made.append(entry)
    taken = {entry.number for entry in made}
    free = (number for number in count() if number not in taken)
    for entry in homeless:
        entry.number = next(free)
        entry.folder = str(entry.number)
    made.sort(key=lambda entry: entry.number)
    for entry in made:
        load_status(entry, sweep.folder, request.jobs[0].config.sweep.objective)
        if entry.state != "finished":
            _forget(entry)
    return made


def recorded(folder: Path) -> list[Entry]:
    """Return the runs in the record of a sweep; none if there is no record."""
    try:
        return SweepRecord.read(folder).entries
    except FileNotFoundError:
        return []


def finished_search(folder: Path) -> bool:
    """Return whether a sweeper that chooses its jobs has finished."""
    try:
        return SweepRecord.read(folder).state == "finished"
    except FileNotFoundError:
        return False


def load_status(entry: Entry, sweep: Path, objective: str) -> None:
    """Take over what a run's own folder says of it; nothing where it says nothing of this run."""
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
    """Move what unfinished runs left to ``earlier/<number>-<k>``, so that they start afresh."""
    for name in folders:
        folder = sweep / name
        if not folder.exists():
            continue
        home = sweep / files.EARLIER
        home.mkdir(exist_ok=True)
        free = (home / f"{name.replace('/', '-')}-{k}" for k in count(1))
        folder.rename(next(place for place in free if not place.exists()))


def _is_hydras(word: str) -> bool:
    """Return whether an override sets a key of Hydra, which is the same for all jobs."""
    return word.lstrip("+~").startswith(("hydra.", "hydra/"))


def _forget(entry: Entry) -> None:
    entry.state = "waiting"
    entry.exit_code = entry.error = entry.objective = entry.seconds = entry.clip_ratio = None
