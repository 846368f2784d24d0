"""Read the environment variables by which torchrun, Slurm or torch elastic describe a process."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from contextlib import suppress
from typing import NamedTuple


class StartedRank(NamedTuple):
    """A process that a launcher started as one of several."""

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int


def started_rank() -> StartedRank | None:
    """Return this process's rank, or None if no launcher set ``RANK`` and ``WORLD_SIZE``."""
    rank = variable("RANK")
    world_size = variable("WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    return StartedRank(rank, world_size, variable("LOCAL_RANK"), variable("LOCAL_WORLD_SIZE") or 1)


def join_slurm_step() -> None:
    """Describe a task that srun started by the variables of torchrun, so that it is a rank.

    Variables that are set already are kept: srun may have started torchrun, and a user may choose
    ``MASTER_ADDR`` and ``MASTER_PORT``. A batch script is no task of a step, and a step of one task
    starts its ranks itself (``plugin.nproc``).
    """
    rank = variable("SLURM_PROCID")
    ranks = variable("SLURM_STEP_NUM_TASKS") or 1
    if ranks == 1 or rank is None or os.environ.get("RANK") or os.environ.get("WORLD_SIZE"):
        return
    machines = variable("SLURM_STEP_NUM_NODES") or 1
    tasks_of_machines = _tasks_of_machines(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    machine = variable("SLURM_NODEID") or 0
    local_ranks = tasks_of_machines[machine] if machine < len(tasks_of_machines) else 1
    os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(ranks)
    os.environ["LOCAL_RANK"] = str(variable("SLURM_LOCALID") or 0)
    os.environ["LOCAL_WORLD_SIZE"] = str(local_ranks)
    os.environ["GROUP_WORLD_SIZE"] = str(machines)
    if not os.environ.get("MASTER_ADDR"):
        os.environ["MASTER_ADDR"] = _first_machine() if machines > 1 else "127.0.0.1"
    if not os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = str(_port())
    if not os.environ.get("OMP_NUM_THREADS"):  # torch would start a thread on each core
        os.environ["OMP_NUM_THREADS"] = str(_threads(local_ranks))


def _port() -> int:
    """Return a port that all ranks calculate alike, below those that Linux gives to connections."""
    job = variable("SLURM_JOB_ID") or 0
    step = variable("SLURM_STEP_ID") or 0
    return 15000 + (job + 1009 * step) % 15000


def _threads(local_ranks: int) -> int:
    """Return the number of threads of one rank: its share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    share = (variable("SLURM_CPUS_ON_NODE") or cores) // local_ranks
    return max(1, min(cores, share))


def in_slurm_step() -> bool:
    """Return whether this process is one of several tasks that srun started."""
    return (variable("SLURM_STEP_NUM_TASKS") or 1) > 1 and not os.environ.get("TORCHELASTIC_RUN_ID")


def _tasks_of_machines(text: str) -> list[int]:
    """Return the number of tasks on each machine from Slurm's short form, such as ``2(x3),1``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_machine() -> str:
    """Return the address of the machine that runs the first task, ``n1`` of ``n[1-4,7],m2``."""
    names = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", names)
    name = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")
    with suppress(OSError):
        socket.getaddrinfo(name, None)
        return name
    command = ["scontrol", "show", "node", name]  # Slurm may know it by another address
    with suppress(OSError, subprocess.SubprocessError):
        process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        address = re.search(r"\bNodeAddr=(\S+)", process.stdout)
        if address:
            return address[1]
    return name


def started_nodes() -> int | None:
    """Return the number of machines on which a launcher started ranks; None if it is not known."""
    started = started_rank()
    if started is None:
        return None
    nodes = variable("GROUP_WORLD_SIZE")
    if nodes:
        return nodes
    local_ranks = variable("LOCAL_WORLD_SIZE")
    return started.world_size // local_ranks if local_ranks else None


def most_ranks_on_cpus() -> int:
    """Return how many ranks may share the cores of this machine: four a core, at least 8."""
    return max(8, 4 * (os.cpu_count() or 1))


def joins() -> bool:
    """Return whether a launcher started this process as a rank other than the first."""
    return bool(variable("WORLD_SIZE") and variable("RANK"))


def slurm_job() -> str | None:
    """Return the id of the Slurm job that this process belongs to; None outside of Slurm."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return os.environ.get("SLURM_JOB_ID") or None


def variable(name: str) -> int | None:
    """Return the integer in a variable of the environment; None if it is unset or empty."""
    value = os.environ.get(name)
    return int(value) if value else None
