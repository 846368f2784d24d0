"""Train a run in this process, on local ranks, or as the first rank of torchrun.

Local ranks are started by torch's elastic agent. This process then trains nothing and follows
``metrics.jsonl``, so that the record is whole if a rank is killed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from runner.config.environment import StartedRank, started_rank
from runner.config.masking import remembered
from runner.config.schema import RunConfig
from runner.launch import signals
from runner.launch.failure import KNOBS, Failure, is_lost_peer, stopped_by
from runner.launch.prepare import ensure_fork_server
from runner.launch.resume import ANEW, Start
from runner.run_folder import files
from runner.run_folder.strict_json import follow
from runner.telemetry.sinks import Sink
from runner.telemetry.sinks.console import is_watched
from runner.train import stop

if TYPE_CHECKING:
    from runner.launch.rank import Task, Work
    from runner.launch.reports import Reports


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
