"""Read the environment variables by which torchrun, Slurm or torch elastic describe a process."""

from __future__ import annotations

import os
from typing import NamedTuple


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


def variable(name: str) -> int | None:
    value = os.environ.get(name)
    return int(value) if value else None
