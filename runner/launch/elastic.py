"""Start the ranks of a run on this machine by torch's elastic agent.

This process trains nothing. It follows the rows that the first rank appends to ``metrics.jsonl``,
so a rank that is killed takes none of the record with it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from runner.config.environment import OWN_STORE, started_rank
from runner.config.problem import Problem, RequestError, Stopped
from runner.config.schema import RunConfig
from runner.config.sizes import least_ranks
from runner.launch import failure, signals
from runner.launch.failure import KNOBS, Failure
from runner.run_folder import files
from runner.run_folder.rows import follow
from runner.telemetry.sinks import Sink
from runner.train import stop

if TYPE_CHECKING:
    from runner.launch.rank import Job

# Seconds by which the agent kills its ranks later than `shutdown.timeout`, when they end
LATER = 10
# What the fork server imports for all ranks. It calculates nothing, because threads would not exist
# in its children, and asks for no GPU, because a driver that was asked cannot be used after a fork
PRELOADED = (
    *("runner.launch.rank", "torch._dynamo", "torch.utils.serialization.config"),
    *("torch.distributed.fsdp", "torch.distributed.pipelining", "runner.booster.plugin"),
)


def require_one_machine(config: RunConfig) -> None:
    """Refuse what only one machine has been started for."""
    nodes = config.plugin.nnodes
    if (nodes or 1) > 1 and started_rank() is None:
        message = (
            "this command starts ranks on this machine alone: start it on each machine by "
            f"torchrun --nnodes={nodes} --nproc-per-node=N --rdzv-backend=c10d "
            "--rdzv-endpoint=FIRST_HOST:29400 --rdzv-id=JOB -m runner"
        )
        raise RequestError([Problem("plugin.nnodes", nodes, message)])


def prepare(*configs: RunConfig) -> None:
    """Start the fork server in the background, if one of these runs has ranks of its own."""
    if any(least_ranks(one.plugin) > 1 or one.launch.max_restarts for one in configs):
        _ensure_running()


def _ensure_running() -> None:
    """Start the server; no signal reaches it and its children, until these unblock them."""
    multiprocessing.set_forkserver_preload([*PRELOADED])
    resource_tracker.ensure_running()  # it would unblock some of them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.ASKING)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def train_on_ranks(job: Job, ranks: int, shown: Sequence[Sink]) -> dict[str, Any]:
    """Start the ranks of a run, show the rows of the first rank, and wait for all ranks."""
    stop.requested()  # from here on a signal is noted, and passed on to the ranks
    ended = threading.Event()
    file = job.folder / files.ROWS
    rows = (file, ended, shown, file.stat().st_size if file.exists() else 0)
    follower = threading.Thread(target=_feed, args=rows, name="rows")
    follower.start()
    try:
        return _launch(job, ranks)
    finally:
        ended.set()
        follower.join()


def _feed(file: Path, stopped: threading.Event, sinks: Sequence[Sink], earlier: int) -> None:
    for row in follow(file, stopped, start=earlier):
        for sink in sinks:
            sink.write(row)


def _launch(job: Job, ranks: int) -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from runner.launch.rank import local_main

    for name in [*logging.root.manager.loggerDict]:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the end of a run says it shorter
    os.environ[OWN_STORE] = "1"
    _ensure_running()
    asked = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="local",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=job.config.launch.max_restarts,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="",
        shutdown_timeout=int(job.config.shutdown.timeout) + LATER,
    )

    def end(number: int, frame: FrameType | None) -> None:
        # One time only: a second exception would keep the agent from ending its ranks
        first = not stop.requested()
        stop.request(number)
        if first:
            raise SignalException(signal.Signals(number).name, signal.Signals(number))

    before = {number: signal.signal(number, end) for number in job.handled}
    try:
        if number := stop.requested():
            raise Stopped(number)
        summary: dict[str, Any] = elastic_launch(asked, local_main)(job)[0]
        return summary
    except SignalException as error:
        raise Stopped(int(error.sigval)) from None
    except ChildFailedError as error:
        raise _end_of(job, ranks, *error.get_first_failure()) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_of(job: Job, size: int, rank: int, process: Any) -> Exception:
    """Return why the ranks ended: the first one that did may only have lost a connection."""
    code = process.exitcode
    if code in (129, 130, 143):  # a signal reached this rank alone
        return Stopped(code - 128)
    if code in (1, -signal.SIGABRT):  # by which NCCL ends a rank that waits for too long
        return failure.blamed(job.folder, size, job.config.launch.timeout)
    if code > 0:
        return Failure(f"rank {rank} exited with code {code}", rank)
    end = f"rank {rank} was ended by {process.signal_name()}"
    if code == -signal.SIGKILL:
        end += f", as the system does if it runs {KNOBS}"
    return Failure(end, rank)
