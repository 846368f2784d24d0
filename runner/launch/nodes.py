"""Train on several machines from tasks of Slurm: one task a machine, or one task a rank.

With one task a machine, torch's elastic agent, which ``torchrun`` runs too, starts the ranks of the
machine and watches them. The machines find each other through a file in the folder for outputs,
which they share.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from runner.config.environment import OWN_STORE, SlurmTask, slurm_task, started_rank
from runner.config.folders import outputs
from runner.config.notation import plural
from runner.config.problem import Problem, RequestError
from runner.config.schema import RunConfig
from runner.config.sizes import ranks_of
from runner.launch import signals
from runner.run_folder.strict_json import read_object, write_object
from runner.telemetry.sinks.console import print_line

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGUSR1"
"""Signals that the agent passes on to its ranks."""

LATER = 10
"""Seconds by which the agent kills its ranks later than ``shutdown.timeout``, when they end."""

SEEN = 120.0
"""Seconds until a file that another machine writes must be seen: NFS may hide it for a minute."""


class Place(NamedTuple):
    """Where the machines of a run meet."""

    host: str
    port: int


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
    """Return the task of Slurm that this process is, one of those that a run needs."""
    task, nodes = slurm_task(), config.plugin.nnodes or 1
    if task is None or task.tasks == 1:
        require_one_machine(config)
    assert task is not None
    ranks = ranks_of(config.plugin, _gpus(config))
    problems = []
    if task.nodes != nodes:
        message = f"srun started {plural(task.nodes, 'machine')}: give {task.nodes}"
        problems.append(Problem("plugin.nnodes", nodes, message))
    elif task.tasks not in (nodes, ranks):
        message = (
            f"srun started {plural(task.tasks, 'task')}: start one a machine "
            f"(srun --nodes={nodes} --ntasks-per-node=1), or one a rank (--ntasks={ranks})"
        )
        problems.append(Problem("plugin.nnodes", nodes, message))
    elif task.tasks != nodes and config.launch.max_restarts:
        message = "needs one task a machine (srun --ntasks-per-node=1), which starts its ranks"
        problems.append(Problem("launch.max_restarts", config.launch.max_restarts, message))
    if problems:
        raise RequestError(problems)
    return task


@contextmanager
def as_rank(task: SlurmTask, timeout: float) -> Iterator[None]:
    """Make this process, a task of Slurm, a rank as ``torchrun`` would start it."""
    with meeting(task, timeout) as place:
        os.environ |= {
            "RANK": str(task.number),
            "WORLD_SIZE": str(task.tasks),
            "LOCAL_RANK": str(task.local),
            "LOCAL_WORLD_SIZE": str(task.tasks // task.nodes),
            "GROUP_RANK": str(task.node),
            "GROUP_WORLD_SIZE": str(task.nodes),
            "MASTER_ADDR": place.host,
            "MASTER_PORT": str(place.port),
        }
        yield


def launch(config: RunConfig, words: Sequence[str], task: SlurmTask) -> int:
    """Start the ranks of this machine, and wait for their end."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    local = ranks_of(config.plugin, _gpus(config)) // task.nodes
    os.environ.setdefault(OWN_STORE, "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // local)))
    with (
        meeting(task, config.launch.timeout) as place,
        tempfile.TemporaryDirectory(prefix="clip-runner-") as folder,
    ):
        asked = LaunchConfig(
            min_nodes=task.nodes,
            max_nodes=task.nodes,
            nproc_per_node=local,
            run_id=task.step,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{place.host}:{place.port}",
            rdzv_configs={
                "is_host": task.node == 0,
                "join_timeout": config.launch.timeout,
                "read_timeout": int(config.launch.timeout),
            },
            max_restarts=config.launch.max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=SIGNALS,
            shutdown_timeout=int(config.shutdown.timeout) + LATER,
        )
        signals.leave_to_ranks()
        try:
            elastic_launch(asked, sys.executable)("-m", "runner", *words)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                name = failure.signal_name()
                _say(task, f"rank {rank} was ended by {name}")
            return failure.exitcode if failure.exitcode in (2, 129, 130, 143) else 1
        except SignalException as error:
            return signals.exit_code(error.sigval)
        except RendezvousError as error:
            limit = f"launch.timeout={config.launch.timeout:g} s"
            _say(
                task, f"the {task.nodes} machines did not meet at {place.host} in {limit}: {error}"
            )
            return 1
    return 0


@contextmanager
def meeting(task: SlurmTask, timeout: float) -> Iterator[Place]:
    """Yield where the machines meet: the first one writes it to a file that all of them see."""
    file = outputs() / "meetings" / f"{task.step}.json"
    if task.number == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        place = Place(host, int(os.environ.get("MASTER_PORT") or _free_port()))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_object(file, {**place._asdict(), "from": task.name})
        try:
            yield place
        finally:
            with suppress(OSError):
                file.unlink()
                file.parent.rmdir()
        return
    found, until = read_object(file), time.monotonic() + min(timeout, SEEN)
    while not found:
        if time.monotonic() > until:
            message = (
                f"{task.name} does not see {file}, which the first machine writes: the machines of "
                "a run share one folder for outputs (RUNNER_OUTPUTS) on a disk that all of them see"
            )
            raise RequestError([Problem("plugin.nnodes", task.nodes, message)])
        time.sleep(0.2)
        found = read_object(file)
    yield Place(str(found["host"]), int(found["port"]))


def _gpus(config: RunConfig) -> int:
    """Return the number of GPUs of this machine that Slurm gave to the job."""
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(given) if given.isdigit() and config.device != "cpu" else 0


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _say(task: SlurmTask, text: str) -> None:
    print_line(f"clip-runner: {task.name}: {text}", sys.stderr)
