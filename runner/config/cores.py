"""How many cores a run may use: those of the machine, its Slurm job, or its share of a sweep."""

from __future__ import annotations

import os
from contextlib import suppress

CORES = "RUNNER_CORES"
"""Environment variable with the cores that a command, or one run of a sweep, may use."""

_ALLOCATED = "SLURM_CPUS_ON_NODE"


def cores() -> int:
    """Return the number of cores that this process and its ranks may use together; at least 1."""
    if chosen := _number(CORES):
        return chosen
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    return max(1, min(usable, _number(_ALLOCATED) or usable))


def _number(name: str) -> int | None:
    with suppress(ValueError):
        return max(1, int(os.environ.get(name, "")))
    return None
