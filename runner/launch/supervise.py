"""Train a run, and keep its record: in this process, on local ranks, or as torchrun's first rank.

Local ranks are started by torch's elastic agent. This process then trains nothing and follows
``metrics.jsonl``, so that the record is whole if a rank is killed.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from runner.config.environment import StartedRank, started_rank
from runner.config.identity import NOT_HASHED
from runner.config.masking import hidden, hidden_in, remembered
from runner.config.notation import with_short_numbers
from runner.config.ordinary import show_path
from runner.config.schema import RunConfig
from runner.launch import signals
from runner.launch.failure import KNOBS, Failure, attempt, is_lost_peer, stopped_by
from runner.launch.prepare import ensure_fork_server
from runner.launch.resume import ANEW, Start, newest
from runner.run_folder import files, keys
from runner.run_folder.status import RESUMED, Record, provenance
from runner.run_folder.strict_json import cut, follow
from runner.telemetry.guidance import sentences
from runner.telemetry.sinks import Sink
from runner.telemetry.sinks.console import TerminalSink, is_watched, print_line
from runner.telemetry.sinks.run_log import RunLog
from runner.telemetry.sinks.tensorboard import TensorboardSink
from runner.telemetry.sinks.wandb_sink import WandbSink, new_run_id
from runner.train import stop

if TYPE_CHECKING:
    from runner.launch.rank import Task, Work
    from runner.launch.reports import Reports

log = logging.getLogger(__name__)


def train(
    config: RunConfig,
    folder: Path,
    shown: Sequence[Sink],
    work: Work | None = None,
    start: Start = ANEW,
) -> dict[str, Any]:
    """Train in this process, on local ranks, or as the first rank of torchrun."""
    with signals.deferred():
        from runner.launch.process_group import leave, stand_alone
        from runner.launch.rank import Task, perform
        from runner.train import build

    started = started_rank()
    device = build.device_of(config.device)
    if is_watched(sys.stderr) and device.type == "cpu":
        config = config.model_copy(update={"log": config.log.model_copy(update={"flush": 1})})
    task = Task(
        config,
        folder.absolute(),
        work,
        resume=start.checkpoint,
        step=start.step,
        handled=tuple(signals.handled()),
        secrets=remembered(),
    )
    if started is not None and config.plugin.name != "single":
        return _train_as_first_rank(task, shown, started)
    ranks = build.ranks_of(config)
    if started is None and (ranks > 1 or config.launch.max_restarts):
        return train_on_ranks(task, ranks, shown)
    try:
        if config.plugin.name != "single":
            stand_alone()
        return perform(task, shown)
    finally:
        leave()


def _train_as_first_rank(task: Task, shown: Sequence[Sink], started: StartedRank) -> dict[str, Any]:
    """Train as the first rank of torchrun; a Failure names the rank that ended the others."""
    with signals.deferred():
        from runner.launch.process_group import abandon, leave
        from runner.launch.rank import train_as_rank
        from runner.launch.reports import Reports

    timeout = task.config.launch.timeout
    reported = Reports()
    try:
        result = train_as_rank(task, timeout, reported, shown)
    except stop.Stopped:
        leave()
        raise
    except BaseException as error:
        abandon()
        # A rank that lost a peer may have been asked to end by torchrun, because of that peer
        failed = isinstance(error, Exception) and not stopped_by(error)
        if started.world_size > 1 and (failed or is_lost_peer(error)):
            raise reported.blamed(task.folder, started.world_size, timeout) from error
        raise
    leave()
    return result


def train_on_ranks(task: Task, ranks: int, shown: Sequence[Sink]) -> dict[str, Any]:
    """Start the ranks of a run on this machine, and show their rows until they have ended."""
    stop.defer()  # a signal is passed on to the ranks
    ended = threading.Event()
    file = task.folder / files.ROWS
    rows = follow(file, ended, start=file.stat().st_size if file.exists() else 0)

    def show() -> None:
        for row in rows:
            for sink in shown:
                sink.write(row)

    follower = threading.Thread(target=show, name="rows")
    follower.start()
    try:
        return _launch(task, ranks)
    finally:
        ended.set()
        follower.join()


def _launch(task: Task, ranks: int) -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from runner.launch.rank import local_main
    from runner.launch.rendezvous import OneMachine
    from runner.launch.reports import Reports

    for name in [*logging.root.manager.loggerDict]:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the end of a run says it shorter
    rendezvous_handler_registry.register("one machine", OneMachine)
    ensure_fork_server()
    reported = Reports.served()
    task = replace(task, port=reported.port)
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="local",
        rdzv_backend="one machine",
        local_addr="127.0.0.1",
        max_restarts=task.config.launch.max_restarts,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="",
        shutdown_timeout=int(task.config.shutdown.timeout) + 10,  # the ranks end before
    )

    def end(number: int, frame: FrameType | None) -> None:
        # One time only: a second exception would keep the agent from ending its ranks
        first = not stop.requested()
        stop.request(number)
        if first:
            raise SignalException(signal.Signals(number).name, signal.Signals(number))

    before = {number: signal.signal(number, end) for number in task.handled}
    try:
        requested = stop.requested()
        if requested:
            raise stop.Stopped(requested)
        return dict(elastic_launch(launch_config, local_main)(task)[0])
    except SignalException as error:
        raise stop.Stopped(int(error.sigval)) from None
    except ChildFailedError as error:
        raise _end_of(task, reported, ranks, *error.get_first_failure()) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_of(task: Task, reported: Reports, size: int, rank: int, process: Any) -> Exception:
    code = process.exitcode  # of the first one that ended; it may only have lost a connection
    if code in (129, 130, 143):  # a signal reached this rank alone
        return stop.Stopped(code - 128)
    failure = reported.raised(size)
    if failure is not None:
        return failure
    if code in (1, -signal.SIGABRT):  # by which NCCL ends a rank that waits for too long
        return reported.blamed(task.folder, size, task.config.launch.timeout)
    if code > 0:
        return Failure(f"rank {rank} exited with code {code}", rank)
    memory = f", as the system does if it runs {KNOBS}" if code == -signal.SIGKILL else ""
    return Failure(f"rank {rank} was ended by {process.signal_name()}{memory}", rank)


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
