"""Run a sweep: find the runs that are left, start them, record how the sweep ended."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

from runner.config.identity import masked_words
from runner.config.jobs import Job, Sweep, Where
from runner.config.problem import Interrupted, Problem, RequestError
from runner.config.request import Request
from runner.config.schema import RunConfig
from runner.launch import signals
from runner.launch.supervise import write_page
from runner.run_folder import files
from runner.run_folder.status import Entry, SweepRecord, changed, claimed, now
from runner.sweep import live
from runner.sweep.job import grouped, run_job
from runner.sweep.resume import archive, continues, load_status, plan_runs, require_same
from runner.telemetry.sinks.console import print_line
from runner.telemetry.sinks.wandb_sink import SWEEP_JOB_TYPE, WandbSink, records
from runner.train import stop

log = logging.getLogger("runner.wandb")

_LATER = 5.0  # seconds that runs have longer than `shutdown.timeout`, until the sweep ends
_ASK = 10.0  # seconds between two questions to Slurm, which many users share


def run_sweep(
    request: Request,
    typed: Sequence[str],
    check: Callable[[Sequence[Job], Where], None],
) -> int:
    """Run the runs of a sweep that are not finished yet."""
    sweep = request.sweep
    assert sweep is not None
    search = sweep.trials is not None
    if left := _left(request, sweep, plan_runs(request)):
        check(left, sweep.where)
        require_same(left)
    with claimed(sweep.folder, "hydra.sweep.dir"):
        _wait_for_slurm(plan_runs(request))
        entries = plan_runs(request)
        if done := live.resumed(entries):
            print_line(done, sys.stderr)
        if not _left(request, sweep, entries):
            return _show(sweep.folder, SweepRecord.read(sweep.folder))
        _begin(request, sweep, entries, typed)
        code, interrupted = 1, False
        try:
            with signals.last_words(lambda code, why: _end(sweep.folder, code, True, search)):
                _launch(request, sweep, entries)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            interrupted = code in (129, 130, 143)
        except KeyboardInterrupt:
            interrupted = True
            raise Interrupted from None
        except Exception:  # of Hydra's sweeper or launcher
            traceback.print_exc()
        finally:
            stop.requested()  # a signal is noted from here on: the record is written whole
            record = _end(sweep.folder, code, interrupted, search)
            if record.state == "interrupted":
                print_line(live.interruption(record, search), sys.stderr)
            failed = _show(sweep.folder, record)
            if record.state != "interrupted":
                _record_in_wandb(sweep.folder, request.jobs[0].config)
        return max(code, failed)


def _left(request: Request, sweep: Sweep, entries: Sequence[Entry]) -> list[Job]:
    """Return the jobs that have to run; representative jobs of a search that is not finished."""
    if sweep.trials is not None:
        record = SweepRecord.find(sweep.folder)
        return [] if record and record.state == "finished" else list(request.jobs)
    waiting = [entry.config_hash for entry in entries if entry.state == "waiting"]
    return [job for job in request.jobs if job.hash in waiting]


def _wait_for_slurm(entries: Sequence[Entry]) -> None:
    """Wait for the jobs of these runs that Slurm has, from a command that ended before them."""
    jobs = {one.job for one in entries if one.state == "waiting" and one.job}
    if left := jobs & _queued() if jobs else set():
        print_line(f"clip-runner: {live.in_slurm(sorted(left))}", sys.stderr)
    while left:
        time.sleep(_ASK)
        left &= _queued()


def _queued() -> set[str]:
    """Return this user's jobs that run or wait in Slurm."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        message = f"Slurm does not say which jobs it has ({error}); try again"
        raise RequestError([Problem("hydra/launcher", "submitit_slurm", message)]) from None
    return set(found.stdout.split())


def _begin(request: Request, sweep: Sweep, entries: list[Entry], typed: Sequence[str]) -> None:
    """Archive old files of the runs that will run, and write the record."""
    before = SweepRecord.find(sweep.folder)
    settings = request.jobs[0].config.sweep
    never = request.jobs[0].config.resume.source == "never"
    waiting = [one for one in entries if one.state == "waiting"]
    old = [one.folder for one in waiting if never or not continues(one, sweep.folder)]
    if sweep.trials is not None:  # a search learns from its first run on, so it starts afresh
        old = [one.name for one in sweep.folder.iterdir() if one.name.isdecimal()]
    archive(sweep.folder, old)
    record = SweepRecord(
        name=sweep.name,
        words=list(typed),
        request=sweep.identity,
        objective=settings.objective,
        maximizes=settings.maximizes,
        max_failures=settings.max_failures,
        keys=list(sweep.lists),
        total=len(entries) if sweep.trials is None else sweep.trials,
        started=before.started if before else now(),
        entries=entries,
    )
    record.write(sweep.folder)


def _launch(request: Request, sweep: Sweep, entries: Sequence[Entry]) -> None:
    """Let Hydra's sweeper and launcher run what waits."""
    waiting = [(one.number, one.words) for one in entries if one.state == "waiting"]
    limit = request.jobs[0].config.shutdown.timeout
    launch = partial(request.launch, run_job, waiting, sweep.folder / files.MULTIRUN)
    if sweep.where == "here":
        launch()
    elif sweep.where == "beside":
        with _followed(sweep.folder, limit, passes_on=True):
            launch()
    else:
        os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"  # submitit reads it here and in jobs
        before = _submitted(sweep.folder)
        try:
            with _followed(sweep.folder, limit, passes_on=False):
                launch()
        finally:
            jobs = [one for one in _submitted(sweep.folder) if one not in before]
            with changed(sweep.folder) as record:  # they go on if this command was interrupted
                for (number, _), job in zip(waiting, jobs, strict=False):
                    record.of(number).job = job
    if (record := SweepRecord.read(sweep.folder)).gives_up:
        print_line(f"the sweep stops: sweep.max_failures={record.max_failures}", sys.stderr)
        raise SystemExit(1)


def _submitted(sweep: Path) -> list[str]:
    """Return the jobs that submitit has submitted, each of which has a folder, in their order."""
    names = [one.name for one in (sweep / ".submitit").glob("[0-9]*")]
    return sorted(names, key=lambda name: [int(part) for part in name.split("_")])


@contextmanager
def _followed(sweep: Path, timeout: float, passes_on: bool) -> Iterator[None]:
    """Tell how runs in other processes go; pass on a signal that asks this process to stop."""
    over, seen, told = threading.Event(), dict[int, str](), set[int]()

    def look() -> SweepRecord:
        record = SweepRecord.read(sweep)
        for entry in record.entries:
            before, seen[entry.number] = seen.get(entry.number, "waiting"), entry.state
            if entry.state != before and not passes_on:  # these print into files
                print_line(live.news(record, entry), sys.stderr)
        if passes_on and (number := stop.requested()):
            with changed(sweep) as record:
                record.state = "interrupted"  # no further run begins
            pids = {one.pid for one in record.entries if one.state == "running" and one.pid}
            for pid in pids - told:
                told.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        return record

    def follow() -> None:
        asked, missing = time.monotonic(), 0
        while not over.wait(0.2):
            states = {one.state for one in look().entries}
            if not passes_on and time.monotonic() - asked > _ASK:
                asked = time.monotonic()
                with suppress(RequestError):
                    left = _queued().intersection(_submitted(sweep))
                    missing = 0 if left or states <= {"finished", "failed"} else missing + 1
            if missing == 3:  # without sacct, submitit waits for these jobs for ever
                print_line("clip-runner: Slurm has lost the jobs that are left", sys.stderr)
                os.kill(os.getpid(), SIGTERM)
                break
        look()

    thread = threading.Thread(target=follow, daemon=True, name="runs")
    if passes_on:
        signals.set_timeout(timeout + _LATER)
        stop.requested()  # from here on a signal is noted only
    thread.start()
    try:
        yield
    except Exception:
        if not (passes_on and stop.requested()):  # what follows from the end of the runs
            raise
    finally:
        over.set()
        thread.join()
    if passes_on and (number := stop.reset()):
        raise KeyboardInterrupt if number == SIGINT else signals.Terminated(number)


def _end(folder: Path, code: int, interrupted: bool, search: bool) -> SweepRecord:
    """Write how the sweep ended, and its runs."""
    with changed(folder) as record:
        for entry in record.entries:
            if entry.state == "running":
                load_status(entry, folder, record.objective)
            # A job in Slurm goes on without the command; another process was killed.
            if entry.state == "running" and entry.job is None:
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
    """Write the page and print the table; return 1 if a run failed, else 0."""
    page = write_page(folder)
    print_line(live.table(record))
    print_line(str(page or folder))
    return int(any(entry.state == "failed" for entry in record.entries))


def _record_in_wandb(folder: Path, config: RunConfig) -> None:
    """Record a sweep with wandb if its runs are recorded there and have figures."""
    if config.tracker.uses("wandb") and records(config.tracker.mode):
        try:
            _draw(folder, config)
        except Exception as error:
            log.warning("wandb records nothing of the sweep: %r", error)


def _draw(folder: Path, config: RunConfig) -> None:
    from runner import report
    from runner.report.charts import sections
    from runner.report.findings import find

    found, record = find(report.read(folder)), SweepRecord.read(folder)
    charts = [one for _, listed, _ in sections(found) for one in listed]
    figures = {f"sweep/{one.key}": _plain(one.figure) for one in charts}
    if not figures:
        return
    summary: dict[str, Any] = {"runs": len(found.sweep.runs)}
    if found.best is not None:
        summary["best"] = {"setting": found.best.label, found.metric: found.mean(found.best)[0]}
    tracker = config.tracker.model_dump(exclude={"name", "also"})
    sink = WandbSink(
        folder,
        **grouped({"tracker": tracker}, record.name)["tracker"] | {"job_type": SWEEP_JOB_TYPE},
        name=record.name,
        # The same when more of its runs are done.
        run_id=hashlib.sha256(f"{record.name} {record.started}".encode()).hexdigest()[:16],
        config={"command": masked_words(record.words), "keys": record.keys},
        resumes=True,
        time_left=signals.time_left,
    )
    sink.draw(figures)
    sink.close(summary, int(record.state != "finished"))


def _plain(figure: Any) -> Any:
    """Return a figure with lists for plotly's bytes, which only its latest versions read."""
    from plotly.utils import PlotlyJSONEncoder

    parts = {"data": [one.to_plotly_json() for one in figure.data]}
    parts["layout"] = figure.layout.to_plotly_json()
    return json.loads(json.dumps(parts, cls=PlotlyJSONEncoder))
