"""Read the environment variables by which torchrun, Slurm or torch elastic describe a process."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

# Gives the ranks of each attempt of torchrun a store of their own; the one that it keeps by default
# has addresses of the ranks before: https://github.com/pytorch/pytorch/issues/135712
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class StartedRank(NamedTuple):
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int


def started_rank() -> StartedRank | None:
    """Return this process's rank, or None if no launcher set ``RANK`` and ``WORLD_SIZE``."""
    rank, world_size = variable("RANK"), variable("WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    return StartedRank(rank, world_size, variable("LOCAL_RANK"), variable("LOCAL_WORLD_SIZE") or 1)


def started_nodes() -> int | None:
    """Return the number of machines on which a launcher started ranks; None if it is not known."""
    started, local = started_rank(), variable("LOCAL_WORLD_SIZE")
    if started is None:
        return None
    return variable("GROUP_WORLD_SIZE") or (started.world_size // local if local else None)


def joins() -> bool:
    """Return whether a launcher started this process as a rank other than the first."""
    return bool(variable("WORLD_SIZE") and variable("RANK"))


def slurm_job() -> str | None:
    """Return the id of the Slurm job that this process belongs to; None outside of Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID") or None


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def elastic_job() -> str | None:
    """Return what identifies the torchrun that started this process, also after a restart."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return elastic_agent() if name == "none" else name or None


def elastic_agent() -> str | None:
    """Return which process of torchrun started this one: it starts it again after a failure."""
    by_elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{socket.gethostname()}-{os.getppid()}" if by_elastic else None


def cores() -> int:
    """Return the number of cores that this process and its ranks may use together; at least 1."""
    own = hasattr(os, "sched_getaffinity")
    usable = (len(os.sched_getaffinity(0)) if own else os.cpu_count()) or 1
    return max(1, min(usable, variable("SLURM_CPUS_ON_NODE") or usable))


def variable(name: str) -> int | None:
    value = os.environ.get(name)
    return int(value) if value else None
