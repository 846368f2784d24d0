"""The ranks of a process group in a script's own words, under the names of Colossal-AI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def get_current_device() -> torch.device:
    """Return the device that this rank computes on: its GPU, or the CPU if there is none.

    Move the model and each batch to it: a Booster leaves them where they are.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class DistCoordinator:
    """What a script asks about its ranks, and how they wait for each other.

    The first rank is the master.

    Raises:
        RuntimeError: there is no process group.

    Example:
        >>> coordinator = DistCoordinator()
        >>> with coordinator.priority_execution():
        ...     data = CIFAR10("data", download=True)
        >>> coordinator.print_on_master("the data is here")
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "DistCoordinator needs a process group: call runner.launch_from_torch() first, "
                "and start the script by torchrun"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    def is_master(self) -> bool:
        """Return whether this is the first rank."""
        return dist.get_rank() == 0

    def print_on_master(self, msg: str) -> None:
        """Print ``msg`` on the first rank."""
        if self.is_master():
            print(msg)

    @contextmanager
    def priority_execution(self) -> Iterator[None]:
        """Return a context that the master runs first, for a download that the others read.

        If the master raises, the others run all the same.
        """
        if not self.is_master():
            dist.barrier()
        try:
            yield
        finally:
            if self.is_master():
                dist.barrier()
