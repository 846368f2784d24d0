"""Run one job, and keep its record: in this process, on local ranks, or as torchrun's first rank.

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
from dataclasses import replace
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
    from runner.launch.rank import Job, Work
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
        from runner.launch.rank import Job, perform
        from runner.train import build

    started = started_rank()
    device = build.device_of(config.device)
    if is_watched(sys.stderr) and device.type == "cpu":
        config = config.model_copy(update={"log": config.log.model_copy(update={"flush": 1})})
    job = Job(
        config,
        folder.absolute(),
        work,
        resume=start.checkpoint,
        step=start.step,
        handled=tuple(signals.handled()),
        secrets=remembered(),
    )
    if started is not None and config.plugin.name != "single":
        return _train_as_first_rank(job, shown, started)
    ranks = build.ranks_of(config)
    if started is None and (ranks > 1 or config.launch.max_restarts):
        return train_on_ranks(job, ranks, shown)
    try:
        if config.plugin.name != "single":
            stand_alone()
        return perform(job, shown)
    finally:
        leave()


def _train_as_first_rank(job: Job, shown: Sequence[Sink], started: StartedRank) -> dict[str, Any]:
    """Train as the first rank of torchrun; a Failure names the rank that ended the others."""
    with signals.deferred():
        from runner.launch.process_group import abandon, leave
        from runner.launch.rank import train_as_rank
        from runner.launch.reports import Reports

    timeout = job.config.launch.timeout
    reported = Reports()
    try:
        result = train_as_rank(job, timeout, reported, shown)
    except stop.Stopped:
        leave()
        raise
    except BaseException as error:
        abandon()
        # A rank that lost a peer may have been asked to end by torchrun, because of that peer
        failed = isinstance(error, Exception) and not stopped_by(error)
        if started.world_size > 1 and (failed or is_lost_peer(error)):
            raise reported.blamed(job.folder, started.world_size, timeout) from error
        raise
    leave()
    return result


def train_on_ranks(job: Job, ranks: int, shown: Sequence[Sink]) -> dict[str, Any]:
    """Start the ranks of a run on this machine, and show their rows until they have ended."""
    stop.defer()  # a signal is passed on to the ranks
    ended = threading.Event()
    file = job.folder / files.ROWS
    rows = follow(file, ended, start=file.stat().st_size if file.exists() else 0)

    def show() -> None:
        for row in rows:
            for sink in shown:
                sink.write(row)

    follower = threading.Thread(target=show, name="rows")
    follower.start()
    try:
        return _launch(job, ranks)
    finally:
        ended.set()
        follower.join()


def _launch(job: Job, ranks: int) -> dict[str, Any]:
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
    job = replace(job, port=reported.port)
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="local",
        rdzv_backend="one machine",
        local_addr="127.0.0.1",
        max_restarts=job.config.launch.max_restarts,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="",
        shutdown_timeout=int(job.config.shutdown.timeout) + 10,  # the ranks end before
    )

    def end(number: int, frame: FrameType | None) -> None:
        # One time only: a second exception would keep the agent from ending its ranks
        first = not stop.requested()
        stop.request(number)
        if first:
            raise SignalException(signal.Signals(number).name, signal.Signals(number))

    before = {number: signal.signal(number, end) for number in job.handled}
    try:
        requested = stop.requested()
        if requested:
            raise stop.Stopped(requested)
        return dict(elastic_launch(launch_config, local_main)(job)[0])
    except SignalException as error:
        raise stop.Stopped(int(error.sigval)) from None
    except ChildFailedError as error:
        raise _end_of(job, reported, ranks, *error.get_first_failure()) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_of(job: Job, reported: Reports, size: int, rank: int, process: Any) -> Exception:
    code = process.exitcode  # of the first one that ended; it may only have lost a connection
    if code in (129, 130, 143):  # a signal reached this rank alone
        return stop.Stopped(code - 128)
    failure = reported.raised(size)
    if failure is not None:
        return failure
    if code in (1, -signal.SIGABRT):  # by which NCCL ends a rank that waits for too long
        return reported.blamed(job.folder, size, job.config.launch.timeout)
    if code > 0:
        return Failure(f"rank {rank} exited with code {code}", rank)
    memory = f", as the system does if it runs {KNOBS}" if code == -signal.SIGKILL else ""
    return Failure(f"rank {rank} was ended by {process.signal_name()}{memory}", rank)


def run(
    config: RunConfig,
    plain: dict[str, Any],
    folder: Path,
    words: Sequence[str] = (),
    *,
    start: Start = ANEW,
    swept: Sequence[str] | None = None,
    alone: bool = True,
    page: Callable[[Path], Path | None] | None = None,
) -> Failure | None:
    """Run one job, and keep its record in its folder.

    Args:
        config: the checked configuration.
        plain: the configuration as it is recorded.
        folder: the folder of the run.
        words: its overrides.
        start: where it starts.
        swept: keys that vary in the sweep that it belongs to; None for a run of its own.
        alone: whether it has the terminal for itself.
        page: writes the page of the run, whose path is printed.

    Returns:
        Why the run failed; None if it finished.
    """
    signals.set_timeout(config.shutdown.timeout)
    show_path(folder)
    record = Record(folder)
    run_id = _wandb_run_id(config, start)
    made_with = provenance()  # may take seconds, after which an interrupt would not be recorded
    stop.defer()  # a signal is recorded from here on
    resumed = start.status()
    status = record.begin(plain, run_id, **resumed)
    cut(folder / files.ROWS, start.step if start.former else 0)
    shutil.rmtree(folder / files.RANKS, ignore_errors=True)
    shown: list[Sink] = [record, RunLog(folder, words, made_with)]
    _announce(start)

    def show_and_train() -> dict[str, Any]:
        from runner.train import build

        title = folder.name if swept is None else f"run {folder.name}"
        steps = build.steps_of(config, build.make_data(config.data))
        interval = max(config.log.interval, config.log.flush)  # a line a step would bury the rest
        shown.append(TerminalSink(steps, interval, title, alone=alone))
        shown.extend(_trackers(config, plain, folder, name_of(words, swept, folder), status))
        trained = train(config, folder, shown, start=start)
        trained[keys.WALL_SECONDS] += resumed.get(keys.WALL_SECONDS, 0.0)
        trained["guidance"] = sentences(trained.get("remarks", ()), swept or ())
        trained |= made_with
        record.summary(trained)
        reason = trained.get(keys.ENDED_EARLY)
        if reason and swept is None:
            print_line(f"clip-runner: ended early: {reason}", sys.stderr)
        return trained

    logging.captureWarnings(True)  # and so in runner.log
    with signals.last_words(lambda code, why: record.end("interrupted", code, why)):
        outcome = attempt(show_and_train)
        logging.captureWarnings(False)
        # The status first: closing wandb may take seconds.
        failed: Failure | None = None
        summary: dict[str, Any] | None = None
        if isinstance(outcome, Failure):
            failed = outcome
        else:
            summary = outcome
        _record_end(record, failed)
    shutil.rmtree(folder / files.RANKS, ignore_errors=True)
    exit_code = failed.exit_code if failed else 0
    for sink in shown:
        sink.close(summary, exit_code)
    if failed is not None:
        _log_failure(failed, folder, logging.ERROR if swept is None else logging.INFO)
    if page is not None:
        place = page(folder) or folder
        _advise(folder, words, stopped=exit_code > 128)
        print_line(str(place))
    _raise_signal(exit_code, swept is not None)
    return failed


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


def _advise(folder: Path, words: Sequence[str], stopped: bool) -> None:
    """Print the commands that continue a run which was stopped, and that upload it to wandb."""
    if stopped and newest(folder).checkpoint is not None:
        kept = [word for word in words if not word.startswith("resume")]
        again = shlex.join([f"resume={folder}", *kept])
        print_line(f"clip-runner: to continue: python -m runner {again}", sys.stderr)
    if any(word.startswith("tracker") for word in words) or os.environ.get("WANDB_API_KEY"):
        for offline in folder.glob("wandb/offline-run-*"):
            path = min(str(offline), os.path.relpath(offline), key=len)
            print_line(f"clip-runner: to upload: wandb sync {path}", sys.stderr)


def name_of(words: Sequence[str], swept: Sequence[str] | None, folder: Path) -> str:
    """Return the name of a run for its trackers: what sets it apart, in at most 60 characters."""
    apart = []
    for word in words:
        key = word.partition("=")[0]
        section = key.lstrip("+~").partition(".")[0]
        if section not in (*NOT_HASHED, "launch") if swept is None else key in swept:
            apart.append(with_short_numbers(word))
    name = " ".join(apart) or folder.name
    return name if len(name) <= 60 else f"{name[:59]}…"


def _trackers(
    config: RunConfig, plain: dict[str, Any], folder: Path, name: str, status: dict[str, Any]
) -> Iterator[Sink]:
    continued_after = status["step"] if RESUMED in status else None
    if config.tracker.uses("wandb"):
        aside = ("calibrate", "verify", "sweep", "report")  # they say nothing about a run itself
        yield WandbSink(
            folder,
            **hidden_in(config.tracker.model_dump(exclude={"name", "also"})),
            name=hidden(name),
            run_id=status["wandb_run_id"],
            config={key: value for key, value in plain.items() if key not in aside},
            continued_after=continued_after,
            time_left=lambda: signals.time_left() - 2.0,  # for the page of the run
        )
    if config.tracker.uses("tensorboard"):
        yield TensorboardSink(folder, continued_after)
