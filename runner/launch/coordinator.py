"""The ranks of a process group in a script's own words, under the names of Colossal-AI."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from runner.config.environment import started_rank

P = ParamSpec("P")
T = TypeVar("T")


def get_current_device() -> torch.device:
    """Return the device that this rank computes on: its GPU, or the CPU if there is none.

    Move the model and each batch to it: a Booster leaves them where they are.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class DistCoordinator:
    """What a script asks about its rank, and how its ranks wait for each other.

    The first rank of all is the master; the first one on a machine is the node's master. Methods
    that take ``process_group`` count ranks in that group; by default, in the group of all ranks.

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
    def rank(self) -> int:
        """Rank of this process."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine; -1 if the launcher does not set it."""
        started = started_rank()
        return -1 if started is None or started.local_rank is None else started.local_rank

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is the first rank."""
        return dist.get_rank(process_group) == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is the last rank."""
        return dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def is_node_master(self) -> bool:
        """Return whether this is the first rank on its machine.

        Raises:
            RuntimeError: the launcher does not set ``LOCAL_RANK``.
        """
        if self.local_rank < 0:
            raise RuntimeError(
                "LOCAL_RANK is not set, so this rank does not know which ranks share its machine: "
                "start the script by torchrun"
            )
        return self.local_rank == 0

    def print_on_master(self, msg: str, process_group: dist.ProcessGroup | None = None) -> None:
        """Print ``msg`` on the first rank."""
        if self.is_master(process_group):
            print(msg)

    def print_on_node_master(self, msg: str) -> None:
        """Print ``msg`` on the first rank of each machine.

        Raises:
            RuntimeError: as :meth:`is_node_master`.
        """
        if self.is_node_master():
            print(msg)

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """Return a context that one rank runs first, for a download or a file that others read.

        Args:
            executor_rank: the rank that runs first. If it raises, the others run all the same.
            process_group: ranks that take part.

        Raises:
            ValueError: there is no such rank.
        """
        size = dist.get_world_size(process_group)
        if not 0 <= executor_rank < size:
            raise ValueError(f"executor_rank is 0 to {size - 1}, not {executor_rank}")
        first = dist.get_rank(process_group) == executor_rank
        if not first:
            self.block_all(process_group)
        try:
            yield
        finally:
            if first:
                self.block_all(process_group)

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait until all ranks have called this."""
        dist.barrier(process_group)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
        """Return a decorator: the function runs on the first rank, and is None on the others."""
        runs = self.is_master(process_group)

        def decorate(function: Callable[P, T]) -> Callable[P, T | None]:
            @functools.wraps(function)
            def called(*args: P.args, **kwargs: P.kwargs) -> T | None:
                return function(*args, **kwargs) if runs else None

            return called

        return decorate

    def destroy(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Leave the process group; by default, every group."""
        dist.destroy_process_group(process_group)
