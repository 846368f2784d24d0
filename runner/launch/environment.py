"""What the environment tells about ranks that torchrun or Slurm started."""

from __future__ import annotations

import os


def joins() -> bool:
    """Whether an outer launcher started this process as a rank other than the first."""
    return world_size() > 1 and int(os.environ.get("RANK") or 0) > 0


def world_size() -> int:
    """Return the number of ranks that an outer launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE") or 1) if "RANK" in os.environ else 1
