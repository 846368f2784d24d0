"""Start ranks by torch's elastic agent: those of this machine, and with Slurm those of several.

The ranks are forked from a server that has torch imported, so that further runs start at once.
This process trains nothing. It follows the rows that the first rank appends to ``metrics.jsonl``,
so a rank that is killed takes none of the record with it. With one task of Slurm on each machine,
the first task keeps the record; the others find its folder, and where the ranks meet, in a file of
the folder for outputs, which the machines share.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.environment import OWN_STORE, SlurmTask, slurm_task, started_rank
from runner.config.folders import outputs
from runner.config.notation import plural
from runner.config.problem import Problem, RequestError, Stopped
from runner.config.schema import RunConfig
from runner.config.sizes import least_ranks
from runner.launch import failure, signals
from runner.launch.failure import KNOBS, RankFailed
from runner.run_folder import files
from runner.run_folder.rows import follow
from runner.run_folder.strict_json import read_object, write_object
from runner.telemetry.sinks.console import print_line
from runner.telemetry.sinks.sink import Sink
from runner.train import stop

if TYPE_CHECKING:
    from runner.launch.rank import Job

LATER = 10
"""Seconds by which the agent kills its ranks later than ``shutdown.timeout``, when they end."""

SEEN = 120.0
"""Seconds until a file that another machine writes must be seen: NFS may hide it for a minute."""

_KNOWN = ("runner", "torch", "torchvision")
"""Packages that import without a thread or a GPU; those of a user may do anything."""

_OF_PLUGIN = {
    **dict.fromkeys(("fsdp", "zero", "tensor", "moe"), "torch.distributed.fsdp"),
    **dict.fromkeys(("pipeline", "hybrid"), "torch.distributed.pipelining"),
}


def preloaded(configs: Iterable[RunConfig]) -> list[str]:
    """Return the modules that the fork server imports for the ranks of these runs.

    It calculates nothing, because threads would not exist in its children, and asks for no GPU,
    because a driver that was asked cannot be used after a fork.
    """
    names = ["runner.launch.rank", "torch._dynamo", "torch.utils.serialization.config"]
    for config in configs:
        names.append(f"runner.booster.plugin.{config.plugin.name}")
        names.append(_OF_PLUGIN.get(config.plugin.name, "torch"))
        for section in (config.data, config.model, config.optimizer, config.scheduler):
            module = section.target.rpartition(".")[0]
            names += [module] if module.partition(".")[0] in _KNOWN else []
    return list(dict.fromkeys(names))


def prepare(*configs: RunConfig) -> None:
    """Start the fork server in the background, if one of these runs has ranks of its own."""
    needy = [one for one in configs if least_ranks(one.plugin) > 1 or one.launch.max_restarts]
    if needy:
        _ensure_running(needy)


def _ensure_running(configs: Sequence[RunConfig]) -> None:
    """Start the server; no signal reaches it and its children, until these unblock them."""
    multiprocessing.set_forkserver_preload(preloaded(configs))
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
        nodes = job.config.plugin.nnodes or 1
        if nodes == 1:
            return _launch(job, ranks)
        task = task_of(job.config)
        with meeting(task, job) as place:
            return _launch(job, ranks // nodes, task, place)
    finally:
        ended.set()
        follower.join()


def join_first_node(config: RunConfig) -> int:
    """Start the ranks of this machine for a run whose record the first machine keeps."""
    from runner.launch.rank import Job
    from runner.train import build

    signals.set_timeout(config.shutdown.timeout)
    task = task_of(config)
    found = _found(task, config.launch.timeout)
    stop.requested()  # from here on a signal is noted, and passed on to the ranks
    folder, resume = Path(found["folder"]), found["resume"]
    handled = tuple(signals.handled())
    job = Job(config, folder, None, resume and Path(resume), found["step"], handled)
    try:
        _launch(job, build.ranks_of(config) // task.nodes, task, found["place"])
    except Stopped as stopped:
        return signals.exit_code(stopped.signal)
    except RankFailed as failed:
        failure.report(folder, failed.rank, failed.error)
        print_line(f"clip-runner: {task.name}: {failed.error.splitlines()[-1]}", sys.stderr)
        return 1
    return 0


def _launch(
    job: Job, local: int, task: SlurmTask | None = None, place: str = "127.0.0.1:0"
) -> dict[str, Any]:
    """Start the ranks of this machine, and return what the first one returns."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from runner.launch.rank import local_main

    config, nodes = job.config, task.nodes if task else 1
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what it says is said below
    os.environ[OWN_STORE] = "1"
    _ensure_running([config])
    before = {number: signal.getsignal(number) for number in signals.ASKING}
    asked = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=local,
        run_id=task.step if task else "local",
        rdzv_backend="c10d",
        rdzv_endpoint=place,
        rdzv_configs={
            "is_host": task is None or task.node == 0,
            "join_timeout": config.launch.timeout,
            "read_timeout": int(config.launch.timeout),
        },
        local_addr=None if task else "127.0.0.1",
        max_restarts=config.launch.max_restarts,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle=",".join(signal.Signals(one).name for one in job.handled),
        shutdown_timeout=int(config.shutdown.timeout) + LATER,
    )
    if number := stop.requested():
        raise Stopped(number)
    try:
        results = elastic_launch(asked, local_main)(job)
    except SignalException as error:
        raise Stopped(int(error.sigval)) from None
    except ChildFailedError as error:
        raise _failure(job, local * nodes, *error.get_first_failure()) from None
    except RendezvousError as error:
        limit = f"launch.timeout={config.launch.timeout:g} s"
        text = f"the {nodes} machines did not meet at {place} in {limit}: {error}"
        raise RankFailed(0, text) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
    summary: dict[str, Any] = results[min(results)]
    return summary


def _failure(job: Job, size: int, rank: int, process: Any) -> Exception:
    """Return why the ranks ended: the first one that did may only have lost a connection."""
    code = process.exitcode
    if code in (129, 130, 143):  # a signal reached this rank alone
        return Stopped(code - 128)
    if code in (1, -signal.SIGABRT):  # by which NCCL ends a rank that waits for too long
        return failure.blamed(job.folder, size, job.config.launch.timeout)
    if code >= 0:
        return RankFailed(rank, f"rank {rank} exited with code {code}")
    end = f"rank {rank} was ended by {process.signal_name()}"
    if code == -signal.SIGKILL:
        end += f", as the system does if it runs {KNOBS}"
    return RankFailed(rank, end)


def _feed(file: Path, stopped: threading.Event, sinks: Sequence[Sink], earlier: int) -> None:
    for row in follow(file, stopped, start=earlier):
        for sink in sinks:
            sink.write(row)


def several(config: RunConfig) -> bool:
    """Return whether a run is for several machines whose ranks nobody has started yet."""
    return (config.plugin.nnodes or 1) > 1 and started_rank() is None


def require_one_machine(config: RunConfig) -> None:
    """Refuse what only one machine has been started for."""
    if several(config):
        nodes = config.plugin.nnodes
        message = (
            "this command starts ranks on this machine alone: start python -m runner on each "
            f"machine by srun --nodes={nodes} --ntasks-per-node=1, or by torchrun --nnodes={nodes}"
        )
        raise RequestError([Problem("plugin.nnodes", nodes, message)])


def task_of(config: RunConfig) -> SlurmTask:
    """Return the task of Slurm that this process is, one on each machine of a run."""
    task, nodes = slurm_task(), config.plugin.nnodes or 1
    if task is None or task.tasks == 1:
        require_one_machine(config)
    assert task is not None
    if task.nodes != nodes or task.tasks != nodes:
        message = (
            f"srun started {plural(task.tasks, 'task')} on {plural(task.nodes, 'machine')}: start "
            f"one a machine (srun --nodes={nodes} --ntasks-per-node=1)"
        )
        raise RequestError([Problem("plugin.nnodes", nodes, message)])
    return task


@contextmanager
def meeting(task: SlurmTask, job: Job) -> Iterator[str]:
    """Write for the other machines where they meet, and the folder of the run; yield the place."""
    file = _file_of(task)
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    place = f"{host}:{os.environ.get('MASTER_PORT') or _free_port()}"
    file.parent.mkdir(parents=True, exist_ok=True)
    resume = None if job.resume is None else str(job.resume)
    found = {"place": place, "folder": str(job.folder), "resume": resume, "step": job.step}
    write_object(file, found)
    try:
        yield place
    finally:
        with suppress(OSError):
            file.unlink()
            file.parent.rmdir()


def _found(task: SlurmTask, timeout: float) -> dict[str, Any]:
    """Return what the first machine wrote for the others."""
    file, until = _file_of(task), time.monotonic() + min(timeout, SEEN)
    while not (found := read_object(file)):
        if time.monotonic() > until:
            message = (
                f"{task.name} does not see {file}, which the first machine writes: the machines of "
                "a run share one folder for outputs (RUNNER_OUTPUTS) on a disk that all of them see"
            )
            raise RequestError([Problem("plugin.nnodes", task.nodes, message)])
        time.sleep(0.2)
    return found


def _file_of(task: SlurmTask) -> Path:
    return outputs() / "meetings" / f"{task.step}.json"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])
