"""One run from the first line of its record to the last: its status, its sinks and how it ended."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.identity import NOT_HASHED
from runner.config.masking import hidden, hidden_in
from runner.config.notation import plural, with_short_numbers
from runner.config.ordinary import show_path
from runner.config.schema import RunConfig
from runner.launch import signals
from runner.launch.failure import Failure, attempt
from runner.launch.fitting import find_steps, in_microbatches, steps_before
from runner.launch.resume import ANEW, Start, newest
from runner.launch.train import train
from runner.run_folder import files, keys
from runner.run_folder.status import RESUMED, Record, provenance
from runner.run_folder.strict_json import cut
from runner.telemetry.guidance import sentences
from runner.telemetry.sinks import Sink
from runner.telemetry.sinks.console import TerminalSink, print_line
from runner.telemetry.sinks.run_log import RunLog
from runner.telemetry.sinks.tensorboard import TensorboardSink
from runner.telemetry.sinks.wandb_sink import WandbSink, new_run_id
from runner.train import stop

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One run, as it is handed to :func:`run`.

    Attributes:
        config: the checked configuration.
        plain: the configuration as it is recorded.
        folder: the folder of the run.
        overrides: the overrides that asked for it, without secrets.
        start: where it starts.
        swept: keys that vary in the sweep that it belongs to; None for a run of its own.
        alone: whether it has the terminal for itself.
        page: writes the page of the run, whose path is printed.
    """

    config: RunConfig
    plain: dict[str, Any]
    folder: Path
    overrides: Sequence[str] = ()
    start: Start = ANEW
    swept: Sequence[str] | None = None
    alone: bool = True
    page: Callable[[Path], Path | None] | None = None

    @property
    def name(self) -> str:
        """The name of the run for its trackers."""
        return name_of(self.overrides, self.swept, self.folder)


def run(run: Run) -> Failure | None:
    """Train a run, and keep its record; return why it failed, None if it finished."""
    signals.set_timeout(run.config.shutdown.timeout)
    show_path(run.folder)
    supervised = _Supervised(run)
    _announce(run.start)
    logging.captureWarnings(True)  # and so in runner.log
    with signals.last_words(supervised.note_interrupt):
        outcome = attempt(supervised.train)
        logging.captureWarnings(False)
        failure = outcome if isinstance(outcome, Failure) else None
        _record_end(supervised.record, failure)
    shutil.rmtree(run.folder / files.RANKS, ignore_errors=True)
    summary = None if isinstance(outcome, Failure) else outcome
    exit_code = failure.exit_code if failure else 0
    for sink in supervised.sinks:
        sink.close(summary, exit_code)  # after the status: closing wandb may take seconds
    in_sweep = run.swept is not None
    if failure is not None:
        _log_failure(failure, run.folder, logging.INFO if in_sweep else logging.ERROR)
    if run.page is not None:
        place = run.page(run.folder) or run.folder
        _advise(run.folder, run.overrides, stopped=exit_code > 128)
        print_line(str(place))
    _raise_signal(exit_code, in_sweep)
    return failure


class _Supervised:
    """A run that has begun: its record, and the sinks that get its rows."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.record = Record(run.folder)
        run_id = _wandb_run_id(run.config, run.start)
        # It may take seconds, in which an interrupt ends a run that has not begun.
        self._made_with = provenance()
        stop.defer()  # a signal is recorded from here on
        self._status = self.record.begin(run.plain, run_id, **run.start.status())
        cut(run.folder / files.ROWS, run.start.step if run.start.former else 0)
        shutil.rmtree(run.folder / files.RANKS, ignore_errors=True)
        self.sinks: list[Sink] = [
            self.record,
            RunLog(run.folder, run.overrides, self._made_with),
        ]

    def note_interrupt(self, code: int, reason: str) -> None:
        """Write to the record that the process is ended as it is."""
        self.record.end("interrupted", code, reason)

    def train(self) -> dict[str, Any]:
        """Train, and write the summary, which is returned."""
        from runner.train import build

        run = self._run
        config = run.config
        if config.accumulation.finds:
            config = self._in_microbatches_that_fit()
        title = run.folder.name if run.swept is None else f"run {run.folder.name}"
        steps = build.steps_of(config, build.make_data(config.data))
        interval = max(config.log.interval, config.log.flush)  # a line a step would bury the rest
        self.sinks.append(TerminalSink(steps, interval, title, alone=run.alone))
        self.sinks.extend(_trackers(run, self._status))
        summary = train(config, run.folder, self.sinks, start=run.start)
        summary[keys.WALL_SECONDS] += run.start.status().get(keys.WALL_SECONDS, 0.0)
        summary["guidance"] = sentences(summary.get("remarks", ()), run.swept or ())
        summary |= self._made_with
        self.record.summary(summary)
        reason = summary.get(keys.ENDED_EARLY)
        if reason and run.swept is None:
            print_line(f"clip-runner: ended early: {reason}", sys.stderr)
        return summary

    def _in_microbatches_that_fit(self) -> RunConfig:
        """Return the configuration with the microbatches that fit the device, and record them."""
        config = self._run.config
        steps = steps_before(config, self._run.start) or find_steps(config)
        self.record.note({keys.ACCUMULATION_STEPS: steps})
        config = in_microbatches(config, steps)
        microbatches = f"{steps} microbatch{'' if steps == 1 else 'es'}"
        samples = plural(config.data.batch_size, "sample")
        line = f"accumulation=auto: a step of a rank has {microbatches} of {samples}"
        log.info("%s", line)
        print_line(f"clip-runner: {line}", sys.stderr)
        return config


def _wandb_run_id(config: RunConfig, start: Start) -> str | None:
    """Return the id of the run at wandb, the former one if it goes on; None without wandb."""
    if not config.tracker.uses("wandb"):
        return None
    return str(start.former.get("wandb_run_id") or new_run_id())


def _log_failure(failed: Failure, folder: Path, level: int) -> None:
    """Log why a run failed in one line; a signal is no failure, unless it has a traceback."""
    if failed.state == "failed" or "\n" in failed.error:
        log.log(level, "failed: %s (traceback in %s)", failed.line, folder / files.LOG)


def _announce(start: Start) -> None:
    """Log and print from where a run begins."""
    for sentence in start.warnings:
        log.warning("%s", sentence)
    if start.checkpoint is not None:
        line = f"continuing after step {start.step} from {start.checkpoint}"
        log.info(line)
        print_line(f"clip-runner: {line}", sys.stderr)


def _record_end(record: Record, failed: Failure | None) -> None:
    """Write how the run ended to its status, and what all ranks said to its log."""
    if failed is None:
        record.end("finished")
        return
    record.end(failed.state, failed.exit_code, failed.error, rank=failed.rank, node=failed.node)
    log.info("%s", failed.error)
    for text in failed.others:
        log.info("%s", text)


def _raise_signal(exit_code: int, in_sweep: bool) -> None:
    """Raise for the signal that has stopped the run, or that ends the sweep after it."""
    late = stop.reset()  # a signal after the training had ended
    if exit_code > 128:
        raise signals.Interrupted if exit_code == 130 else SystemExit(exit_code)
    if late and in_sweep:
        raise signals.Terminated(late)


def _advise(folder: Path, overrides: Sequence[str], stopped: bool) -> None:
    """Print the commands that continue a run which was stopped, and that upload it to wandb."""
    if stopped and newest(folder).checkpoint is not None:
        kept = [text for text in overrides if not text.startswith("resume")]
        again = shlex.join([f"resume={folder}", *kept])
        print_line(f"clip-runner: to continue: python -m runner {again}", sys.stderr)
    names_tracker = any(text.startswith("tracker") for text in overrides)
    if names_tracker or os.environ.get("WANDB_API_KEY"):
        for offline in folder.glob("wandb/offline-run-*"):
            path = min(str(offline), os.path.relpath(offline), key=len)
            print_line(f"clip-runner: to upload: wandb sync {path}", sys.stderr)


def name_of(overrides: Sequence[str], swept: Sequence[str] | None, folder: Path) -> str:
    """Return the name of a run for its trackers: what sets it apart, in at most 60 characters."""
    apart = []
    for text in overrides:
        key = text.partition("=")[0]
        section = key.lstrip("+~").partition(".")[0]
        if section not in (*NOT_HASHED, "launch") if swept is None else key in swept:
            apart.append(with_short_numbers(text))
    name = " ".join(apart) or folder.name
    return name if len(name) <= 60 else f"{name[:59]}…"


def _trackers(run: Run, status: dict[str, Any]) -> Iterator[Sink]:
    """Yield the trackers of a run. They have imported nothing before it begins."""
    from runner.train.maker import maker

    tracker = run.config.tracker
    continued_after = status["step"] if RESUMED in status else None
    if tracker.uses("wandb"):
        aside = ("calibrate", "verify", "sweep", "report")  # they say nothing about a run itself
        yield WandbSink(
            run.folder,
            **hidden_in(tracker.model_dump(exclude={"name", "target", "also"})),
            name=hidden(run.name),
            run_id=status["wandb_run_id"],
            config={key: value for key, value in run.plain.items() if key not in aside},
            continued_after=continued_after,
            time_left=lambda: signals.time_left() - 2.0,  # for the page of the run
        )
    if tracker.uses("tensorboard"):
        yield TensorboardSink(run.folder, continued_after)
    if tracker.own is not None:
        make = maker(tracker.own)
        yield make(run.folder, continued_after)
