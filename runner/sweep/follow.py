"""Follow runs of a sweep in other processes: print how they go, and pass on a request to stop."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGINT

from runner.launch import signals
from runner.run_folder.sweep_record import Entry, SweepRecord, changed
from runner.sweep import live
from runner.sweep.resume import load_status
from runner.telemetry.sinks.console import print_line
from runner.train import stop

LOOK = 0.5
"""Seconds between two looks at the record of a sweep."""

ASK = 10.0
"""Seconds between two questions to Slurm, which many users share."""

MISSED = 2
"""Questions in a row to which Slurm does not know a job, after which it has ended."""

LATER = 5.0
"""Seconds that runs have longer than ``shutdown.timeout``, until the sweep ends without them."""

_LONGEST = 2**12
"""Characters at the end of a job's output in which its last line is looked for."""


class Follower:
    """Prints a line for each run that begins, continues or ends."""

    def __init__(self, sweep: Path) -> None:
        self._sweep = sweep
        self._seen = {entry.number: entry.state for entry in SweepRecord.read(sweep).entries}

    def look(self) -> SweepRecord:
        """Print what has changed since the last look, and return the record."""
        record = SweepRecord.read(self._sweep)
        for entry in record.entries:
            before = self._seen.get(entry.number, "waiting")
            if entry.state == before:
                continue
            self._seen[entry.number] = entry.state
            if before == "waiting" and entry.state != "running":  # it was short
                print_line(live.beginning(record, entry), sys.stderr)
            print_line(_TEXTS[entry.state](record, entry), sys.stderr)
        return record


_TEXTS = {
    "waiting": live.beginning,
    "running": live.beginning,
    "finished": live.end,
    "interrupted": live.end,
    "failed": live.failure,
}


def follow(sweep: Path, jobs: Mapping[int, str]) -> None:
    """Wait until runs that are jobs of Slurm have ended. One that is queued again is waited for."""
    follower, missed, asked = Follower(sweep), Counter[int](), time.monotonic()
    while True:
        record = follower.look()
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
            if entry.number in left:
                _settle(record, entry, sweep, jobs[entry.number])
    follower.look()


def queued() -> set[str] | None:
    """Return the ids of this user's jobs that run or wait in Slurm; None if Slurm does not
    answer.
    """
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return set(found.stdout.split())


@contextmanager
def passing_on(sweep: Path, timeout: float) -> Iterator[None]:
    """Pass a signal that asks this process to stop on to runs in other processes of this
    machine.
    """
    over = threading.Event()
    thread = threading.Thread(target=_pass_on, args=(sweep, over), daemon=True, name="stop")
    signals.set_timeout(timeout + LATER)
    stop.requested()  # from here on a signal is noted only
    thread.start()
    try:
        yield
    except Exception:
        if not stop.requested():  # what follows from the end of the runs is no error
            raise
    finally:
        over.set()
        thread.join()
    if number := stop.reset():
        raise KeyboardInterrupt if number == SIGINT else signals.Terminated(number)


def objective(record: SweepRecord, number: int) -> float | None:
    """Return what the job of a run returns: its objective, if it has finished with a finite one."""
    for entry in record.entries:
        if entry.number == number and entry.state == "finished" and entry.objective is not None:
            return entry.objective if math.isfinite(entry.objective) else None
    return None


def gives_up(record: SweepRecord) -> bool:
    """Return whether more runs failed than ``sweep.max_failures`` allows."""
    return record.max_failures is not None and record.failures > record.max_failures


def _pass_on(sweep: Path, over: threading.Event) -> None:
    told: set[int] = set()
    while not over.wait(LOOK):
        if number := stop.requested():
            with changed(sweep) as record:
                record.state = "interrupted"  # no further run begins
            pids = {one.pid for one in record.entries if one.state == "running" and one.pid}
            for pid in pids - told:
                told.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, number)


def _settle(record: SweepRecord, entry: Entry, sweep: Path, job: str) -> None:
    """Record how a run ended whose job is gone."""
    if entry.state == "waiting" and gives_up(record):
        return
    load_status(entry, sweep, record.objective)
    if entry.state in ("waiting", "running"):
        entry.state, record.failures = "failed", record.failures + 1
        entry.error = f"its job {job} ended without a record{_last_words(sweep, job)}"


def _last_words(sweep: Path, job: str) -> str:
    """Return where the output of a job of submitit is, with its last line."""
    for file in sorted((sweep / ".submitit" / job).glob("*_log.err")):
        text = file.read_text(encoding="utf-8", errors="replace")[-_LONGEST:].strip()
        if text:
            return f": {text.splitlines()[-1].strip()} (see {file})"
    return ""
