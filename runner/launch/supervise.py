"""Run one job in the process that the user started, which keeps the record and closes it."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runner.config import disk
from runner.config.environment import started_rank
from runner.config.identity import config_hash
from runner.config.problem import Interrupted, Stopped
from runner.config.schema import RunConfig
from runner.launch import failure, signals
from runner.launch.failure import Failure, attempt, may_be_lost_peer
from runner.launch.resume import ANEW, Start, newest
from runner.run_folder import files, keys
from runner.run_folder.rows import JsonlSink, cut, last_step
from runner.run_folder.status import WANDB_STEP, Record, objective_of, provenance
from runner.telemetry.guidance import sentences
from runner.telemetry.sinks import RunLog, Sink, TensorboardSink
from runner.telemetry.sinks.console import TerminalSink, is_watched, print_line
from runner.telemetry.sinks.wandb_sink import WandbSink, new_run_id
from runner.train import stop

log = logging.getLogger(__name__)

# Sections that say nothing about a run itself: wandb does not show them
_OTHERS = ("calibrate", "verify", "sweep", "report")
PAGE_SECONDS = 2.0  # seconds of `shutdown.timeout` that are kept for the page of the run

Work = Callable[[RunConfig, Sequence[Sink]], dict[str, Any]]


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    exit_code: int
    objective: float | None = None
    disk_full: bool = False


def train(
    config: RunConfig,
    folder: Path,
    shown: Sequence[Sink],
    work: Work | None = None,
    start: Start = ANEW,
) -> dict[str, Any]:
    """Train where ``config`` and the environment ask for it."""
    from runner.launch.process_group import abandon, keep_freed_memory, leave, stand_alone
    from runner.launch.rank import Job, train_as_rank
    from runner.train import build
    from runner.train.job import execute

    joined, folder = started_rank(), folder.absolute()
    device = build.device_of(config.device)
    if is_watched(sys.stderr) and device.type == "cpu":
        log_section = config.log.model_copy(update={"flush": 1})
        config = config.model_copy(update={"log": log_section})
    limit, ranks = config.launch.timeout, build.ranks_of(config)
    job = Job(config, folder, work, start.checkpoint, start.step, tuple(signals.handled()))
    if joined is None and (ranks > 1 or config.launch.max_restarts):
        from runner.launch import elastic

        return elastic.train_on_ranks(job, ranks, shown)
    try:
        if joined is not None and config.plugin.name != "single":
            ended = train_as_rank(job, limit, shown)
        else:
            if config.plugin.name != "single":
                stand_alone()
            keep_freed_memory(device.type)
            work = work or partial(execute, folder=folder, resume=start.checkpoint)
            with JsonlSink(folder / files.ROWS) as rows:
                ended = work(config, [rows, *shown])
    except BaseException as error:
        if joined is None or isinstance(error, Stopped):
            leave()
            raise
        abandon()
        if may_be_lost_peer(error):
            raise failure.blamed(folder, joined.world_size, limit) from error
        raise
    leave()
    return ended


def run(
    config: RunConfig,
    plain: dict[str, Any],
    folder: Path,
    words: Sequence[str] = (),
    *,
    start: Start = ANEW,
    reports_end: bool = True,
    swept: Sequence[str] = (),
    alone: bool = True,
) -> Ended:
    """Run one job to its end and record it in ``folder``. A failure is recorded, not raised."""
    signals.set_timeout(config.shutdown.timeout)
    run_id = None
    if config.tracker.uses("wandb"):
        run_id = str(start.former.get("wandb_run_id") or new_run_id())
    record = Record(folder)
    made_with = provenance()  # may take seconds, after which an interrupt would not be recorded
    stop.requested()  # a signal is noted from here on, so that it is recorded
    rows = folder / files.ROWS
    resumed = start.status(last_step(rows))
    record.begin(plain, config_hash(plain), run_id, resumed)
    cut(rows, start.step if start.former else 0)
    failure.clear(folder)
    shown: list[Sink] = [record, RunLog(folder, words, made_with)]
    for sentence in start.warnings:
        log.warning("%s", sentence)
    if start.checkpoint is not None:
        line = f"continuing after step {start.step} from {start.checkpoint}"
        log.info(line)
        print_line(f"clip-runner: {line}", sys.stderr)

    def show_and_train() -> dict[str, Any]:
        shown.append(_terminal(config, folder.name if reports_end else f"run {folder.name}", alone))
        if run_id is not None:
            name, sent = " ".join(words) or folder.name, resumed.get(WANDB_STEP)
            shown.append(_wandb(config, plain, folder, run_id, name, sent))
        if config.tracker.uses("tensorboard"):
            shown.append(TensorboardSink(folder, start.step if start.former else None))
        trained = train(config, folder, shown, start=start)
        trained[keys.WALL_SECONDS] += start.seconds
        trained |= {"guidance": sentences(trained.get("remarks", ()), swept)} | made_with
        record.summary(trained)
        if (reason := trained.get(keys.ENDED_EARLY)) and reports_end:
            print_line(f"clip-runner: ended early: {reason}", sys.stderr)
        return trained

    def write_last(code: int, why: str) -> None:
        record.end("interrupted", code, why, None)

    logging.captureWarnings(True)  # and so in runner.log
    with signals.last_words(write_last):
        ended = attempt(show_and_train)
        logging.captureWarnings(False)
        # The status first: closing wandb may take seconds.
        if isinstance(ended, Failure):
            record.end(ended.state, ended.exit_code, ended.error, ended.rank, ended.node)
            log.info("%s", ended.error)
        else:
            record.end("finished", 0, None, None)
    return _close(config, folder, ended, shown, words, reports_end)


def _close(
    config: RunConfig,
    folder: Path,
    ended: Failure | dict[str, Any],
    shown: Sequence[Sink],
    words: Sequence[str],
    reports_end: bool,
) -> Ended:
    """Close the sinks of a run, write its page, and raise if a signal ended it."""
    failed = ended if isinstance(ended, Failure) else None
    summary = None if isinstance(ended, Failure) else ended
    exit_code = failed.exit_code if failed else 0
    failure.clear(folder)
    for sink in shown:
        sink.close(summary, exit_code)
    page = write_page(folder) if reports_end else None  # the page of a sweep shows all its runs
    if failed and (failed.state == "failed" or "\n" in failed.error):
        level = logging.ERROR if reports_end else logging.INFO
        *_, last = failed.error.splitlines() or ["no message"]
        who = "the run" if config.plugin.name == "single" else f"rank {failed.rank}"
        why = last if last.startswith(f"{who} ") else f"{who} failed: {last}"
        log.log(level, "%s (see %s)", why, folder / files.STATUS)
    if reports_end:
        if exit_code > 128 and newest(folder).checkpoint is not None:
            kept = [word for word in words if not word.startswith("resume")]
            again = shlex.join([f"resume={folder}", *kept])
            print_line(f"clip-runner: to continue: python -m runner {again}", sys.stderr)
        for offline in folder.glob("wandb/offline-run-*"):
            print_line(f"clip-runner: to upload: wandb sync {offline}", sys.stderr)
        print_line(str(page or folder))
    late = stop.reset()  # a signal after the training had ended
    if exit_code == 130:
        raise Interrupted
    if exit_code > 128:
        raise SystemExit(exit_code)
    if late and not reports_end:  # the sweep ends
        raise signals.Terminated(late)
    full = failed is not None and failed.disk_full
    return Ended(exit_code, objective_of(summary or {}, config.sweep.objective), full)


def write_page(folder: Path, left: int = 0) -> Path | None:
    try:
        from runner import report

        return report.write(folder, left)
    except Exception as error:
        why = disk.told(error) or f"the page of {folder} could not be written: {error!r}"
        log.warning("%s", why)
        return None


def _terminal(config: RunConfig, title: str, alone: bool) -> Sink:
    from runner.train import build

    steps = build.steps_of(config, build.make_data(config.data))
    # On a pipe a line a step would bury everything else.
    interval = max(config.log.interval, config.log.flush)
    return TerminalSink(steps, interval, title, alone=alone)


def _wandb(
    config: RunConfig, plain: dict[str, Any], folder: Path, run_id: str, name: str, sent: int | None
) -> Sink:
    described = {key: value for key, value in plain.items() if key not in _OTHERS}
    return WandbSink(
        folder,
        **config.tracker.model_dump(exclude={"name", "also"}),
        name=name,
        run_id=run_id,
        config=described,
        sent_until=sent or 0,
        resumes=sent is not None,
        time_left=lambda: signals.time_left() - PAGE_SECONDS,
    )
