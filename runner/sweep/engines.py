"""Run the runs of a sweep in other processes: several at once on this machine, or as jobs of Slurm.

Hydra's launchers for joblib and submitit compose and run each job. What is added here: the cores
are divided, a signal reaches the runs, and a job of Slurm that is queued again is waited for.
The results of the runs are in the record of the sweep, not in what a launcher hands back.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus

from runner.compose.jobs import Job
from runner.compose.launchers import where
from runner.config.sizes import least_ranks
from runner.launch import signals
from runner.run_folder.status import is_alive
from runner.run_folder.sweep_record import SweepRecord, changed
from runner.sweep import follow
from runner.sweep.share import divided, handed_out, take
from runner.telemetry.sinks.console import print_line

_COMMAND = "RUNNER_SWEEP_PID"
"""Environment variable with the process of the command, for runs beside it."""

_SHARED = {
    *("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node"),
    *("tasks_per_node", "stderr_to_stdout"),
}
"""Options that submitit has for every kind of executor; others have its name before them."""

Words = Sequence[Sequence[str]]
"""The overrides of each run."""


Options = Mapping[str, Any]
"""Keys of ``hydra.launcher``."""


class _Sweep:
    """The sweep of this process: the runs that have to run."""

    jobs: Sequence[Job] = ()


def prepare(jobs: Sequence[Job]) -> None:
    """Set the runs that launchers of this process will launch."""
    _Sweep.jobs = jobs


def at_once(theirs: Any, words: Words, first: int, n_jobs: int) -> Sequence[JobReturn]:
    """Launch runs in processes of joblib."""
    sweep = Path(theirs.config.hydra.sweep.dir)
    with _beside(n_jobs, len(words)) as most, follow.passing_on(sweep, _timeout()):
        theirs.joblib = {"n_jobs": most, "batch_size": 1}
        theirs.launch(words, first)
    return _returned(sweep, range(first, first + len(words)))


def locally(theirs: Any, words: Words, first: int, options: Options) -> Sequence[JobReturn]:
    """Launch runs as processes of submitit on this machine."""
    sweep = Path(theirs.config.hydra.sweep.dir)
    options = dict(options)
    most = options.pop("array_parallelism")
    with _beside(most, len(words)) as most, follow.passing_on(sweep, _timeout()):
        executor, follower = _executor("local", options), follow.Follower(sweep)
        running: list[Any] = []
        for arguments in _arguments(words, first):
            while len(running) >= most:
                running = _still(running, follower)
            running.append(executor.submit(theirs, *arguments))
        while running:
            running = _still(running, follower)
    return _returned(sweep, range(first, first + len(words)))


def _still(running: Sequence[Any], follower: follow.Follower) -> list[Any]:
    """Wait a moment, and return the jobs that still run."""
    time.sleep(follow.LOOK)
    left = [job for job in running if not job.done()]
    follower.look()
    return left


def by_slurm(theirs: Any, words: Words, first: int, options: Options) -> Sequence[JobReturn]:
    """Launch runs as jobs of Slurm, and wait until they have ended."""
    sweep, options = Path(theirs.config.hydra.sweep.dir), dict(options)
    ranks = max(least_ranks(job.config.plugin) for job in _Sweep.jobs)
    if options["cpus_per_task"] is None and ranks > 1:
        options["cpus_per_task"] = ranks
    submitted = _executor("slurm", options).map_array(
        theirs, *zip(*_arguments(words, first), strict=True)
    )
    numbers = range(first, first + len(words))
    jobs = dict(zip(numbers, (job.job_id for job in submitted), strict=True))
    with changed(sweep) as record:
        for entry in record.entries:
            entry.job = jobs.get(entry.number, entry.job)
    several = f"{len(jobs)} jobs" if len(jobs) > 1 else "a job"
    ids = sorted({job.partition("_")[0] for job in jobs.values()})
    print_line(f"clip-runner: submitted {several} to Slurm: {' '.join(ids)}", sys.stderr)
    follow.follow(sweep, jobs)
    return _returned(sweep, numbers)


def enter(target: str) -> None:
    """Prepare a process that a launcher started for its runs; later calls change nothing."""
    place = where(target)
    if place == "here" or _Entered.done:
        return
    _Entered.done = True
    # joblib's processes have a method of their own to start others, which ranks do not know.
    multiprocessing.set_start_method(None, force=True)
    signals.listen()
    if command := os.environ.get(_COMMAND) if place == "beside" else None:
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # the terminal reaches the command alone, which passes signals on
        watch = threading.Thread(target=_watch, args=(int(command),), daemon=True, name="command")
        watch.start()
    take()


class _Entered:
    done = False


def _watch(command: int) -> None:
    """Stop the run of this process, with a checkpoint, when the command was killed."""
    while is_alive(command):
        time.sleep(1)
    os.kill(os.getpid(), signals.ASKING[0])


@contextmanager
def _beside(most: int, runs: int) -> Iterator[int]:
    """Divide this machine among runs at once, and yield their number."""
    share = divided(_Sweep.jobs, most)
    if note := share.note(min(most, runs)):
        print_line(f"clip-runner: note: {note}", sys.stderr)
    os.environ[_COMMAND] = str(os.getpid())
    try:
        with handed_out(share):
            yield share.at_once
    finally:
        del os.environ[_COMMAND]


def _executor(kind: str, options: Mapping[str, Any]) -> Any:
    """Return submitit's executor with the options of a launcher."""
    # submitit reads it when it is imported, here and in jobs.
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"
    import submitit

    given = {name: value for name, value in options.items() if value is not None}
    folder, timeouts = given.pop("submitit_folder"), given.pop("max_num_timeout", 0)
    executor = submitit.AutoExecutor(folder, cluster=kind, **{f"{kind}_max_num_timeout": timeouts})
    named = {name if name in _SHARED else f"{kind}_{name}": one for name, one in given.items()}
    executor.update_parameters(**named)
    return executor


def _arguments(words: Words, first: int) -> list[tuple[Any, ...]]:
    """Return the arguments with which Hydra's launcher for submitit is called for each run."""
    state = Singleton.get_state()
    return [
        (list(each), "hydra.sweep.dir", number, f"job_id_for_{number}", state)
        for number, each in enumerate(words, first)
    ]


def _timeout() -> float:
    return max(job.config.shutdown.timeout for job in _Sweep.jobs)


def _returned(sweep: Path, numbers: Sequence[int]) -> list[JobReturn]:
    """Return the results of runs, as a sweeper of Hydra takes them."""
    record = SweepRecord.read(sweep)
    if follow.gives_up(record):
        print_line(f"the sweep stops: sweep.max_failures={record.max_failures}", sys.stderr)
        raise SystemExit(1)
    made = []
    for number in numbers:
        returned = JobReturn(status=JobStatus.COMPLETED)
        returned.return_value = follow.objective(record, number)
        made.append(returned)
    return made
