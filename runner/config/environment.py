"""Read the environment variables by which torchrun, Slurm or torch elastic describe a process."""

from __future__ import annotations

import os
from typing import NamedTuple


class StartedRank(NamedTuple):
    """The place of this process among the ranks of a launcher.

    Attributes:
        rank: number of this rank.
        world_size: number of all ranks.
        local_rank: number of this rank on its machine; None if the launcher does not set it.
        local_world_size: number of ranks on this machine; 1 if the launcher does not set it.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int


def started_rank() -> StartedRank | None:
    """Return this process's rank, or None if no launcher set ``RANK`` and ``WORLD_SIZE``."""
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    return StartedRank(rank, world_size, _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE") or 1)


def started_nodes() -> int | None:
    """Return the number of machines on which a launcher started ranks; None if it is not known."""
    started = started_rank()
    if started is None:
        return None
    local = _number("LOCAL_WORLD_SIZE")
    return _number("GROUP_WORLD_SIZE") or (started.world_size // local if local else None)


def joins() -> bool:
    """Return whether a launcher started this process as a rank other than the first."""
    started = started_rank()
    return started is not None and started.rank > 0


def slurm_job() -> str | None:
    """Return the id of the Slurm job that this process belongs to; None outside of Slurm."""
    return os.environ.get("SLURM_JOB_ID") or None


def was_requeued() -> bool:
    """Return whether Slurm started this process's job again, such as after a pre-emption."""
    return bool(_number("SLURM_RESTART_COUNT"))


def _number(name: str) -> int | None:
    value = os.environ.get(name)
    return int(value) if value else None
