"""Run a sweep: find the runs that are left, start them, record how the sweep ended."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from runner.config.problem import RequestError
from runner.launch import signals
from runner.report import read
from runner.report.findings import find
from runner.report.page import written
from runner.request.jobs import Job
from runner.request.request import Request
from runner.request.sweep_settings import Place
from runner.run_folder.status import Entry, SweepRecord, changed, claimed, now
from runner.sweep import live, slurm
from runner.sweep.launchers import launch
from runner.sweep.resume import archive, continues, load_status, plan_runs, require_same
from runner.telemetry.sinks.console import print_line

log = logging.getLogger(__name__)


class Sweep:
    """The runs of a request, in one folder with one record and one page.

    Args:
        request: a request of a sweep.
        command: the arguments that its record and its page repeat.
        check: refuses jobs that cannot be trained where they run.
    """

    def __init__(
        self,
        request: Request,
        command: Sequence[str],
        check: Callable[[Sequence[Job], Place], None],
    ) -> None:
        self.request = request
        self.folder = request.folder
        self.command = command
        self._check = check

    def start(self) -> int:
        """Run what is left, and return an exit code: 1 if a run has failed."""
        jobs = self._jobs_left(plan_runs(self.request))
        if jobs:
            self._check(jobs, self.request.place)
            require_same(jobs)
        with claimed(self.folder, "hydra.sweep.dir"):
            entries = self._entries()
            text = live.resumed(entries)
            if text:
                print_line(text, sys.stderr)
            if not self._jobs_left(entries):
                return self._show(self._finish(entries))
            self._begin(entries)
            return self._run(entries)

    def _jobs_left(self, entries: Sequence[Entry]) -> list[Job]:
        """Return the jobs that have to run; representative jobs of a search that has not ended."""
        if self.request.is_search:
            record = SweepRecord.find(self.folder)
            is_finished = record is not None and record.state == "finished"
            return [] if is_finished else list(self.request.jobs)
        waiting = [entry.config_hash for entry in entries if entry.state == "waiting"]
        return [job for job in self.request.jobs if job.hash in waiting]

    def _entries(self) -> list[Entry]:
        """Return the runs of the sweep, after jobs in Slurm of an earlier command have ended."""
        entries = plan_runs(self.request)
        jobs = {entry.job for entry in entries if entry.state == "waiting" and entry.job}
        waited = slurm.wait_for(jobs)
        if not waited:
            return entries
        return [self._after_wait(entry, waited) for entry in plan_runs(self.request)]

    def _after_wait(self, entry: Entry, jobs: Collection[str]) -> Entry:
        """Return a run that waits; but a run that failed in a job that was waited for has ended."""
        ended = replace(entry)
        load_status(ended, self.folder, self.request.jobs[0].config.sweep.objective)
        return ended if entry.job in jobs and ended.state == "failed" else entry

    def _finish(self, entries: list[Entry]) -> SweepRecord:
        """Return the record of the sweep, in which no run waits."""
        record = SweepRecord.read(self.folder)
        if record.state == "finished":
            return record
        # Its jobs have ended after a command that was interrupted.
        with changed(self.folder) as record:
            record.entries = entries or record.entries
        return self._end(0, interrupted=False)

    def _begin(self, entries: list[Entry]) -> None:
        """Archive old files of the runs that will run, and write the record."""
        request = self.request
        config = request.jobs[0].config
        earlier = SweepRecord.find(self.folder)
        archive(self.folder, self._old_folders(entries, config.resume.source == "never"))
        record = SweepRecord(
            name=request.sweep,
            words=list(self.command),
            request=request.identity,
            objective=config.sweep.objective,
            maximizes=config.sweep.maximizes,
            max_failures=config.sweep.max_failures,
            keys=list(request.lists),
            total=len(entries) if request.trials is None else request.trials,
            started=earlier.started if earlier else now(),
            entries=entries,
        )
        record.write(self.folder)

    def _old_folders(self, entries: Sequence[Entry], anew: bool) -> list[str]:
        """Return the folders of runs that start again; ``anew``: no run continues."""
        if self.request.is_search:  # it learns from its first run on, so it starts afresh
            return [path.name for path in self.folder.iterdir() if path.name.isdecimal()]
        waiting = [entry for entry in entries if entry.state == "waiting"]
        return [entry.folder for entry in waiting if anew or not continues(entry, self.folder)]

    def _run(self, entries: Sequence[Entry]) -> int:
        """Run the runs that wait, record how the sweep ended, and return its exit code."""
        code = 1
        interrupted = False
        try:
            with signals.last_words(lambda code, why: self._end(code, interrupted=True)):
                launch(self.request, [entry for entry in entries if entry.state == "waiting"])
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
            record = self._end(code, interrupted)
            if record.state == "interrupted":
                print_line(live.interruption(record, self.request.is_search), sys.stderr)
            failed = self._show(record)
        return max(code, failed)

    def _end(self, code: int, interrupted: bool) -> SweepRecord:
        """Record how the sweep ended, and return the record."""
        with changed(self.folder) as record:
            for entry in record.entries:
                if entry.state == "running":
                    load_status(entry, self.folder, record.objective)
                # A job in Slurm goes on without the command; another process was killed.
                if entry.state == "running" and (entry.job is None or code == 0):
                    entry.state = "interrupted" if interrupted else "failed"
            record.state = self._state(record.entries, code, interrupted)
            record.ended = now()
        return record

    def _state(self, entries: Sequence[Entry], code: int, interrupted: bool) -> str:
        """Return the state of the sweep, which has ended with this exit code."""
        states = {entry.state for entry in entries}
        if interrupted or "interrupted" in states:
            return "interrupted"
        if code == 0 and (self.request.is_search or states <= {"finished"}):
            return "finished"
        return "failed"

    def _show(self, record: SweepRecord) -> int:
        """Write the page and print its answer; return 1 if a run or the sweep failed, else 0."""
        page = written(self.folder)
        try:
            print_line(live.answer(find(read(self.folder))))
        except Exception as error:  # as for the page: what cannot be read ends no sweep
            log.warning("the answer of %s could not be printed: %r", self.folder, error)
        print_line(str(page or self.folder))
        failed = any(entry.state == "failed" for entry in record.entries)
        return int(failed or record.state == "failed")
