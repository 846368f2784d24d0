"""Runs of a sweep as jobs of Slurm, which go on if the command that waits for them ends.

Hydra's launcher for submitit composes and runs each job. What is added here: the numbers of the
jobs are recorded, so that the same command waits for them, and one that is queued again, or that
dies without a record, is told from one that ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus

from runner.run_folder.sweep_record import Entry, SweepRecord, changed
from runner.sweep import live
from runner.sweep.resume import load_status
from runner.telemetry.sinks.console import print_line

LOOK = 0.5
"""Seconds between two looks at the record of a sweep."""

ASK = 10.0
"""Seconds between two questions to Slurm, which many users share."""

MISSED = 2
"""Questions in a row to which Slurm does not know a job, after which it has ended."""

_SHARED = {
    *("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node"),
    *("tasks_per_node", "stderr_to_stdout"),
}
"""Options that submitit has for every kind of executor; others have its name before them."""


def launch(
    theirs: Any, words: Sequence[Sequence[str]], first: int, options: Mapping[str, Any]
) -> Sequence[JobReturn]:
    """Launch runs as jobs of Slurm, and wait until they have ended."""
    # submitit reads it when it is imported, here and in jobs.
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"
    import submitit

    sweep, state = Path(theirs.config.hydra.sweep.dir), Singleton.get_state()
    given = {name: value for name, value in options.items() if value is not None}
    folder, timeouts = given.pop("submitit_folder"), given.pop("max_num_timeout", 0)
    executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=timeouts)
    named = {name if name in _SHARED else f"slurm_{name}": one for name, one in given.items()}
    executor.update_parameters(**named)
    numbers = range(first, first + len(words))
    calls = [
        (list(each), "hydra.sweep.dir", number, f"job_id_for_{number}", state)
        for number, each in zip(numbers, words, strict=True)
    ]
    submitted = executor.map_array(theirs, *zip(*calls, strict=True))
    jobs = dict(zip(numbers, (job.job_id for job in submitted), strict=True))
    with changed(sweep) as record:
        for entry in record.entries:
            entry.job = jobs.get(entry.number, entry.job)
    ids = sorted({job.partition("_")[0] for job in jobs.values()})
    print_line(f"clip-runner: submitted to Slurm: {' '.join(ids)}", sys.stderr)
    follow(sweep, jobs)
    record = SweepRecord.read(sweep)
    objectives = {one.number: one.objective for one in record.entries if one.state == "finished"}
    returned = [JobReturn(status=JobStatus.COMPLETED) for _ in numbers]
    for number, one in zip(numbers, returned, strict=True):
        one.return_value = objectives.get(number)
    return returned


def follow(sweep: Path, jobs: Mapping[int, str]) -> None:
    """Wait until jobs have ended, and print how they go. One that is queued again is waited for."""
    seen = {entry.number: entry.state for entry in SweepRecord.read(sweep).entries}
    missed, asked = Counter[int](), time.monotonic()
    while True:
        record = SweepRecord.read(sweep)
        for entry in record.entries:
            if entry.state != seen[entry.number]:
                seen[entry.number] = entry.state
                print_line(live.news(record, entry), sys.stderr)
        settled = {one.number for one in record.entries if one.state in ("finished", "failed")}
        left = jobs.keys() - settled
        if all(missed[number] >= MISSED for number in left):
            break
        if time.monotonic() - asked > ASK:
            known, asked = queued(), time.monotonic()
            for number in left if known is not None else ():
                gone = jobs[number] not in (known or ())
                missed[number] = missed[number] + 1 if gone else 0
        time.sleep(LOOK)
    with changed(sweep) as record:
        for entry in record.entries:
            if entry.number in left and not (entry.state == "waiting" and record.gives_up):
                _settle(record, entry, sweep, jobs[entry.number])


def queued() -> set[str] | None:
    """Return this user's jobs that run or wait in Slurm; None if Slurm does not answer."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return set(found.stdout.split())


def _settle(record: SweepRecord, entry: Entry, sweep: Path, job: str) -> None:
    """Record how a run ended whose job is gone."""
    load_status(entry, sweep, record.objective)
    if entry.state in ("waiting", "running"):
        entry.state, record.failures = "failed", record.failures + 1
        output = sweep / ".submitit" / job
        entry.error = f"its job {job} ended without a record (see {output})"
        print_line(live.news(record, entry), sys.stderr)
