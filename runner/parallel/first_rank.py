"""Work that one rank does for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def several_ranks() -> bool:
    """Return whether there is a process group of more than one rank."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_first() -> bool:
    """Return whether this is the first rank, or the only one."""
    return not several_ranks() or dist.get_rank() == 0


def on_first(work: Callable[[], T]) -> T:
    """Call ``work`` on the first rank alone; every rank has to call this."""
    result: list[Any] = [None, None]
    if is_first():
        try:
            result[0] = work()
        except Exception as error:  # the other ranks wait for it
            result[1] = error
    if several_ranks():
        dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise result[1]
    returned: T = result[0]
    return returned
