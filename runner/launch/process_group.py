"""The process group of ranks that torchrun, Slurm or this program started, and what scripts ask."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runner.config.environment import join_slurm_step
from runner.config.notation import plural
from runner.launch import signals
from runner.workarounds import let_gloo_drop_tensors, limit_groups_of_meshes

LATER = 5.0  # seconds by which collectives end after `launch.timeout`, when stacks are written


def launch_from_torch(
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    timeout: float = 600.0,
) -> None:
    """Join the process group that the environment describes (``torchrun`` or ``srun`` sets it).

    Host tensors always travel by gloo, so that counts never wait for an accelerator; tensors on a
    GPU by nccl.

    Args:
        backend: backend of all tensors; by default, and with ``nccl``, as above.
        seed: seed of torch's random numbers on this rank.
        verbose: whether rank 0 logs the number of ranks and the backend.
        timeout: maximum duration of one collective of any process group, in seconds.

    Raises:
        RuntimeError: the environment describes no process group, or its port is in use.
    """
    join_slurm_step()
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"the environment does not describe a process group ({', '.join(missing)} not set): "
            "start the script by torchrun --nproc_per_node=N"
        )
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK") or 0)
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    backend = _backend() if backend in (None, "nccl") else backend
    limit = timedelta(seconds=timeout)
    limit_groups_of_meshes(limit)
    try:
        _wait_for_peers(backend, limit)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ["MASTER_PORT"]
        raise RuntimeError(f"MASTER_PORT={port} is in use; choose another port") from error
    atexit.register(_leave_at_exit)
    torch.manual_seed(seed)
    if verbose:
        get_dist_logger().info(f"{plural(dist.get_world_size(), 'rank')} by {backend}", ranks=[0])


def _wait_for_peers(backend: str | None, limit: timedelta) -> None:
    """Create the process group, in a thread: a signal ends the wait for ranks that are not there.

    The wait is in C++, during which Python calls no handler of a signal in that thread.
    """
    errors: list[BaseException] = []

    def join() -> None:
        try:
            dist.init_process_group(backend, timeout=limit)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=join, daemon=True, name="peers")
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        signals.raise_if_noted()
    if errors:
        raise errors[0]


def stand_alone() -> None:
    """Create a process group of this process alone, for a data-parallel run on one rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(_backend(), store=store, rank=0, world_size=1)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def leave() -> None:
    """Leave the process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abandon() -> None:
    """Do not leave the process group at exit: that would wait for ranks that are gone."""
    atexit.unregister(_leave_at_exit)


def _leave_at_exit() -> None:
    leave()
    let_gloo_drop_tensors()


def keep_freed_memory(device: str) -> None:
    """Let glibc keep freed memory for the next step of a training on a CPU.

    With pages mapped and cleared anew, a small network takes 1.2 to 1.6 times as long.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if device != "cpu" or mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return
    # From malloc.h: M_MMAP_THRESHOLD, whose first value older versions refuse; M_TRIM_THRESHOLD
    if mallopt(-3, 2**30) or mallopt(-3, 2**25):
        mallopt(-1, -1)


class DistributedLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger with messages for some ranks: ``logger.info("done", ranks=[0])``."""

    def log(self, level: int, msg: object, *args: Any, **options: Any) -> None:
        """Log ``msg`` on the ranks of the option ``ranks``, or on all."""
        ranks = options.pop("ranks", None)
        if ranks is None or (dist.get_rank() if dist.is_initialized() else 0) in ranks:
            super().log(level, msg, *args, **options)


def get_dist_logger(name: str = "runner") -> DistributedLogger:
    """Return a logger that takes ``ranks=[0]`` with each message.

    It prints to standard error if nobody has set up logging.
    """
    logger = logging.getLogger(name)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    return DistributedLogger(logger)


def get_current_device() -> torch.device:
    """Return the device that this rank computes on: its GPU, or the CPU if there is none.

    Move the model and each batch to it: a Booster leaves them where they are.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class DistCoordinator:
    """What a script asks about its ranks, of which the first one is the master."""

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
        """Return a context that the master runs first; the others follow, also if it raises."""
        if not self.is_master():
            dist.barrier()
        try:
            yield
        finally:
            if self.is_master():
                dist.barrier()
