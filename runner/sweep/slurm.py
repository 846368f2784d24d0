"""The jobs in Slurm that run the runs of a sweep."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM

from runner.config.problem import Problem, RequestError
from runner.run_folder.status import SweepRecord
from runner.sweep import live
from runner.telemetry.sinks.console import print_line

_ASK = 10.0  # seconds between two questions to Slurm, which many users share
_ANSWERS = 3  # answers in a row without a job, after which Slurm has lost it


def queued() -> set[str]:
    """Return the jobs of this user that Slurm has not ended."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        message = f"Slurm does not say which jobs it has ({error}); try again"
        raise RequestError([Problem("hydra/launcher", "submitit_slurm", message)]) from None
    return set(process.stdout.split())


def wait_for(jobs: Collection[str]) -> set[str]:
    """Wait until Slurm has ended these jobs, and return those that it had."""
    if not jobs:
        return set()
    waited = queued().intersection(jobs)
    if waited:
        print_line(f"clip-runner: {live.in_slurm(sorted(waited))}", sys.stderr)
    running = waited
    while running:
        time.sleep(_ASK)
        running = running & queued()
    return waited


def submitted(sweep: Path) -> list[str]:
    """Return the jobs that submitit has submitted, in their order."""
    pickles = (sweep / ".submitit").glob("[0-9]*/*_submitted.pkl")  # an array's own folder has none
    names = [pickle.parent.name for pickle in pickles]
    return sorted(names, key=lambda name: [int(part) for part in name.split("_")])


def is_news(record: logging.LogRecord) -> bool:
    """Return False for what submitit repeats at each question where Slurm keeps no accounts."""
    return "Bypassing sacct error" not in record.getMessage()


class Jobs:
    """The jobs that this command submits for runs of a sweep, in the order of their numbers."""

    def __init__(self, sweep: Path, numbers: Sequence[int]) -> None:
        self._sweep = sweep
        self._numbers = numbers
        self._earlier = {*submitted(sweep)}
        self._states = {entry.number: entry.state for entry in SweepRecord.read(sweep).entries}
        self._asked = time.monotonic()  # when Slurm was asked last
        self._missing = 0  # answers in a row without any of the jobs

    def by_number(self) -> dict[int, str]:
        """Return the job of each run that is submitted."""
        jobs = [job for job in submitted(self._sweep) if job not in self._earlier]
        return dict(zip(self._numbers, jobs, strict=False))

    def look(self) -> None:
        """Print the runs whose state has changed; end the command if Slurm has lost its jobs."""
        record = SweepRecord.read(self._sweep)
        for entry in record.entries:
            if entry.state != self._states.get(entry.number, "waiting"):
                print_line(live.news(record, entry), sys.stderr)
            self._states[entry.number] = entry.state
        if time.monotonic() - self._asked < _ASK:
            return
        self._asked = time.monotonic()
        with suppress(RequestError):
            self._missing = self._missing + 1 if self._are_lost(record) else 0
        if self._missing == _ANSWERS:  # without sacct, submitit waits for these jobs for ever
            print_line("clip-runner: Slurm has lost the jobs that are left", sys.stderr)
            os.kill(os.getpid(), SIGTERM)

    def _are_lost(self, record: SweepRecord) -> bool:
        """Return whether Slurm has lost all jobs, though some of their runs have not ended."""
        jobs = self.by_number()
        # Runs without a job yet wait for those before them, whose end Slurm may tell late.
        begun = {record.of(number).state for number in jobs}
        return not (begun <= {"finished", "failed"} or queued().intersection(jobs.values()))
