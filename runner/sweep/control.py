"""Run a sweep: find the runs that are left, start them, record how the sweep ended."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log
from hydra.experimental.callback import Callback
from hydra.types import HydraContext
from omegaconf import OmegaConf

from runner.config.problem import Problem, RequestError
from runner.launch import signals
from runner.report import read
from runner.report.findings import find
from runner.report.page import written
from runner.request.composer import SUBDIR, refer_to, spelled_out
from runner.request.jobs import Job, Where, setting, unresolved, write_yaml
from runner.request.request import Request
from runner.run_folder import files
from runner.run_folder.status import Entry, SweepRecord, changed, claimed, now
from runner.sweep import live
from runner.sweep.job import run_job, stop_sweep
from runner.sweep.resume import archive, continues, load_status, plan_runs, require_same
from runner.telemetry.sinks.console import is_watched, print_line

_LATER = 5.0  # seconds that runs have longer than `shutdown.timeout`, until the sweep ends
_ASK = 10.0  # seconds between two questions to Slurm, which many users share


def run_sweep(
    request: Request,
    typed: Sequence[str],
    check: Callable[[Sequence[Job], Where], None],
) -> int:
    search, sweep = request.trials is not None, request.folder
    if left := _left(request, plan_runs(request)):
        check(left, request.where)
        require_same(left)
    with claimed(sweep, "hydra.sweep.dir"):
        waited = _wait_for_slurm(plan_runs(request))
        entries = [_after_wait(entry, request, waited) for entry in plan_runs(request)]
        if done := live.resumed(entries):
            print_line(done, sys.stderr)
        if not _left(request, entries):
            record = SweepRecord.read(sweep)
            if record.state != "finished":  # its jobs ended after a command that was interrupted
                with changed(sweep) as record:
                    record.entries = entries or record.entries
                record = _end(sweep, 0, False, search)
            return _show(sweep, record)
        _begin(request, entries, typed)
        code, interrupted = 1, False
        try:
            with signals.last_words(lambda code, why: _end(sweep, code, True, search)):
                _launch(request, entries)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            interrupted = code in (129, 130, 143)
        except KeyboardInterrupt:
            interrupted = True
            raise signals.Interrupted from None
        except RequestError as error:  # a file was changed while a search runs
            print_line(str(error), sys.stderr)
        except Exception:  # of Hydra's sweeper or launcher
            print_line(traceback.format_exc().rstrip(), sys.stderr)
        finally:
            signals.defer()  # the record is written whole
            record = _end(sweep, code, interrupted, search)
            if record.state == "interrupted":
                print_line(live.interruption(record, search), sys.stderr)
            failed = _show(sweep, record)
        return max(code, failed)


def _left(request: Request, entries: Sequence[Entry]) -> list[Job]:
    """Return the jobs that have to run; representative jobs of a search that is not finished."""
    if request.trials is not None:
        record = SweepRecord.find(request.folder)
        return [] if record and record.state == "finished" else list(request.jobs)
    waiting = [entry.config_hash for entry in entries if entry.state == "waiting"]
    return [job for job in request.jobs if job.hash in waiting]


def _wait_for_slurm(entries: Sequence[Entry]) -> set[str]:
    """Wait for jobs of these runs from a command that ended before them; return these jobs."""
    jobs = {entry.job for entry in entries if entry.state == "waiting" and entry.job}
    waited = jobs & _queued() if jobs else set()
    if waited:
        print_line(f"clip-runner: {live.in_slurm(sorted(waited))}", sys.stderr)
    left = waited
    while left:
        time.sleep(_ASK)
        left = left & _queued()
    return waited


def _after_wait(entry: Entry, request: Request, waited: Collection[str]) -> Entry:
    """Return a run that waits; but a run that failed in a job that was waited for has ended."""
    ended = replace(entry)
    load_status(ended, request.folder, request.jobs[0].config.sweep.objective)
    return ended if entry.job in waited and ended.state == "failed" else entry


def _queued() -> set[str]:
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        message = f"Slurm does not say which jobs it has ({error}); try again"
        raise RequestError([Problem("hydra/launcher", "submitit_slurm", message)]) from None
    return set(found.stdout.split())


def _begin(request: Request, entries: list[Entry], typed: Sequence[str]) -> None:
    """Archive old files of the runs that will run, and write the record."""
    before, config = SweepRecord.find(request.folder), request.jobs[0].config
    never = config.resume.source == "never"
    waiting = [one for one in entries if one.state == "waiting"]
    old = [one.folder for one in waiting if never or not continues(one, request.folder)]
    if request.trials is not None:  # a search learns from its first run on, so it starts afresh
        old = [one.name for one in request.folder.iterdir() if one.name.isdecimal()]
    archive(request.folder, old)
    record = SweepRecord(
        name=request.sweep,
        words=list(typed),
        request=request.identity,
        objective=config.sweep.objective,
        maximizes=config.sweep.maximizes,
        max_failures=config.sweep.max_failures,
        keys=list(request.lists),
        total=len(entries) if request.trials is None else request.trials,
        started=before.started if before else now(),
        entries=entries,
    )
    record.write(request.folder)


def _launch(request: Request, entries: Sequence[Entry]) -> None:
    """Run what waits, where the launcher runs it."""
    waiting = [one for one in entries if one.state == "waiting"]
    launch = partial(_launch_by_hydra, request, waiting)
    if request.where == "here":
        launch()
    elif request.where == "beside":
        signals.set_timeout(request.jobs[0].config.shutdown.timeout + _LATER)
        _launch_beside(request.folder, launch)
    else:
        _launch_in_slurm(request.folder, [one.number for one in waiting], launch)
    if (record := SweepRecord.read(request.folder)).gives_up:
        stop_sweep(f"sweep.max_failures={record.max_failures}")


def _launch_by_hydra(request: Request, waiting: Sequence[Entry]) -> None:
    """Let Hydra's launcher, or the sweeper of a search, run what waits."""
    config = request.made.config
    with request.composer.active():
        refer_to(config)
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        write_yaml(request.folder / files.MULTIRUN, unresolved(config))
        context = HydraContext(request.composer, Callback())  # type: ignore[arg-type]
        given: Any = {"hydra_context": context, "task_function": run_job, "config": config}
        if request.trials is not None:
            if params := setting(config, "hydra.sweeper.params"):
                words = spelled_out(f"{key}={value}" for key, value in params.items())
                config.hydra.sweeper.params = dict(word.split("=", 1) for word in words)
            if not is_watched(sys.stderr):
                os.environ.setdefault("NO_COLOR", "1")  # Optuna would write colours into a file
            typed: Any = OmegaConf.to_container(config.hydra.overrides.task)  # references too
            sweeper = Plugins.instance().instantiate_sweeper(**given)
            sweeper.sweep([*typed, *request.lists.values()])
            return
        launcher = Plugins.instance().instantiate_launcher(**given)
        batch = [[*entry.words, f"{SUBDIR}{entry.number}"] for entry in waiting]
        for ended in launcher.launch(batch, 0):
            _ = ended.return_value  # raises what a job raised


def _launch_beside(sweep: Path, launch: Callable[[], None]) -> None:
    """Run processes of this machine; pass on to them a signal that asks this one to stop."""
    told = set[int]()

    def pass_on() -> None:
        if not (number := signals.requested()):
            return
        with changed(sweep) as record:
            record.state = "interrupted"  # no further run begins
        pids = {one.pid for one in record.entries if one.state == "running" and one.pid}
        for pid in pids - told:
            told.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    signals.defer()  # a signal is passed on to the runs
    try:
        with _repeated(pass_on):
            launch()
    except Exception:
        if not signals.requested():  # else it follows from the end of the runs
            raise
    signals.raise_noted()


def _launch_in_slurm(sweep: Path, waiting: Sequence[int], launch: Callable[[], None]) -> None:
    """Submit jobs, tell how they go, and give up those that Slurm has lost."""
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"  # submitit reads it here and in jobs
    before = {*_submitted(sweep)}
    seen = {entry.number: entry.state for entry in SweepRecord.read(sweep).entries}
    asked, missing = time.monotonic(), 0

    def jobs() -> list[str]:
        return [one for one in _submitted(sweep) if one not in before]

    def tell() -> None:
        nonlocal asked, missing
        record = SweepRecord.read(sweep)
        for entry in record.entries:
            former, seen[entry.number] = seen.get(entry.number, "waiting"), entry.state
            if entry.state != former:
                print_line(live.news(record, entry), sys.stderr)
        if time.monotonic() - asked < _ASK:
            return
        asked, mine = time.monotonic(), jobs()
        # Runs without a job yet wait for those before them, whose end Slurm may tell late.
        begun = {record.of(number).state for number, _ in zip(waiting, mine, strict=False)}
        with suppress(RequestError):
            lost = not (begun <= {"finished", "failed"} or _queued().intersection(mine))
            missing = missing + 1 if lost else 0
        if missing == 3:  # without sacct, submitit waits for these jobs for ever
            print_line("clip-runner: Slurm has lost the jobs that are left", sys.stderr)
            os.kill(os.getpid(), SIGTERM)

    submitit = logging.getLogger("submitit")
    submitit.addFilter(_is_news)
    try:
        with _repeated(tell):
            launch()
    finally:
        submitit.removeFilter(_is_news)
        with changed(sweep) as record:  # they go on if this command was interrupted
            for number, job in zip(waiting, jobs(), strict=False):
                record.of(number).job = job


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for what submitit repeats at each question where Slurm keeps no accounts."""
    return "Bypassing sacct error" not in record.getMessage()


def _submitted(sweep: Path) -> list[str]:
    """Return the jobs that submitit has submitted, in their order."""
    pickles = (sweep / ".submitit").glob("[0-9]*/*_submitted.pkl")  # an array's own folder has none
    names = [pickle.parent.name for pickle in pickles]
    return sorted(names, key=lambda name: [int(part) for part in name.split("_")])


@contextmanager
def _repeated(look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` in a thread while the block runs, and at its end."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(0.2):
            look()

    thread = threading.Thread(target=follow, daemon=True, name="runs")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()


def _end(folder: Path, code: int, interrupted: bool, search: bool) -> SweepRecord:
    with changed(folder) as record:
        for entry in record.entries:
            if entry.state == "running":
                load_status(entry, folder, record.objective)
            # A job in Slurm goes on without the command; another process was killed.
            if entry.state == "running" and (entry.job is None or code == 0):
                entry.state = "interrupted" if interrupted else "failed"
        states = {entry.state for entry in record.entries}
        if interrupted or "interrupted" in states:
            record.state = "interrupted"
        elif code == 0 and (search or states <= {"finished"}):
            record.state = "finished"
        else:
            record.state = "failed"
        record.ended = now()
    return record


def _show(folder: Path, record: SweepRecord) -> int:
    """Write the page and print its answer; return 1 if a run or the sweep failed, else 0."""
    page = written(folder)
    with suppress(Exception):  # as for the page: what cannot be read ends no sweep
        print_line(live.answer(find(read(folder))))
    print_line(str(page or folder))
    failed = any(entry.state == "failed" for entry in record.entries)
    return int(failed or record.state == "failed")
