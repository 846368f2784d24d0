"""Find the runs of a sweep that are not finished yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from runner.config.identity import NO_PATH
from runner.config.problem import RequestError
from runner.launch.resume import Start, named, newest, problems
from runner.request.jobs import Job
from runner.request.request import Request
from runner.run_folder import files, keys
from runner.run_folder.status import Entry, SweepRecord, is_unfinished, objective_of
from runner.run_folder.strict_json import read_object


def plan_runs(request: Request) -> list[Entry]:
    """Return the runs of a sweep, each with the state in its folder; nothing is written."""
    if not request.sweep or request.is_search:
        return []
    recorded = _recorded(request)
    taken = {entry.number for entry in recorded if entry}
    free = (number for number in count() if number not in taken)
    planned = []
    for job, old in zip(request.jobs, recorded, strict=True):
        number = old.number if old else next(free)
        waiting = Entry(number, str(number), list(job.varied), list(job.overrides), job.hash)
        waiting.job = old.job if old else None
        entry = replace(waiting)
        load_status(entry, request.folder, job.config.sweep.objective)
        planned.append(entry if entry.state == "finished" else waiting)
    return sorted(planned, key=lambda entry: entry.number)


def _recorded(request: Request) -> list[Entry | None]:
    """Return the entry of each job in the record of an earlier command; None if it has none."""
    record = SweepRecord.find(request.folder)
    by_hash: dict[str, list[Entry]] = defaultdict(list)
    for entry in record.entries if record else ():
        by_hash[entry.config_hash].append(entry)
    return [by_hash[job.hash].pop(0) if by_hash[job.hash] else None for job in request.jobs]


def load_status(entry: Entry, sweep: Path, objective: str) -> None:
    """Copy state and results from the folder of a run, if that folder holds this configuration."""
    folder = sweep / entry.folder
    status = read_object(folder / files.STATUS)
    state = status.get("state")
    if status.get("config_hash") != entry.config_hash or state is None:
        return
    entry.state = state
    entry.exit_code = status.get("exit_code")
    entry.seconds = status.get(keys.WALL_SECONDS)
    error = str(status.get("error") or "").strip().splitlines()
    entry.error = error[-1] if error else None
    if entry.state == "finished":
        summary = read_object(folder / files.SUMMARY)
        if not summary:
            entry.state = "failed"
            entry.error = f"{files.SUMMARY} is gone"
        entry.objective = objective_of(summary, objective)
        entry.clip_ratio = objective_of(summary, keys.CLIP_RATIO_TOTAL)


def continues(entry: Entry, sweep: Path) -> bool:
    """Return whether a run that waits can continue from a checkpoint in its folder."""
    folder = sweep / entry.folder
    same = read_object(folder / files.STATUS).get("config_hash") == entry.config_hash
    return same and is_unfinished(folder) and newest(folder).checkpoint is not None


def require_same(jobs: Sequence[Job]) -> None:
    """Check that the jobs of a sweep can continue from the checkpoint that ``resume`` names."""
    starts: dict[str, Start] = {}
    misfits = []
    for job in jobs:
        source = job.config.resume.source
        if source in NO_PATH:
            continue
        if source not in starts:
            starts[source] = named(source)
        for problem in problems(job.config, job.plain, starts[source]):
            misfits.append(replace(problem, job=job.label))
    if misfits:
        raise RequestError(misfits)


def archive(sweep: Path, folders: Iterable[str]) -> None:
    """Move old folders of runs that start again to ``earlier/<number>-<k>``."""
    for name in folders:
        if (sweep / name).exists():
            (sweep / files.EARLIER).mkdir(exist_ok=True)
            free = (sweep / files.EARLIER / f"{name}-{k}" for k in count(1))
            (sweep / name).rename(next(place for place in free if not place.exists()))
