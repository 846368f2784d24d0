"""Real ranks for tests: processes of a fork server that has torch preloaded, joined by gloo."""

import faulthandler
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

PRELOAD = ["tests.preloaded"]


def run_ranks(
    body: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 600,
    backend: str = "gloo",
) -> list[Any]:
    """Return what ``body(*args)`` returns on each of ``world`` ranks, which share a process group.

    ``body`` is importable by name, and ``args`` are picklable. After ``timeout`` seconds every rank
    dumps its stacks and the test fails. With the backend nccl each rank has a GPU of its own.

    Raises:
        AssertionError: with the traceback of the first rank that failed.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        processes = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            store = str(Path(folder) / "store")
            job = (theirs, store, rank, world, timeout, backend, body, args)
            process = context.Process(target=_rank, args=job, daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return _collect(ends, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.join(2)
                process.kill()


def _collect(ends: list[Connection], deadline: float) -> list[Any]:
    results = []
    for rank, end in enumerate(ends):
        if not end.poll(max(0.0, deadline - time.monotonic())):
            raise AssertionError(f"rank {rank} said nothing in time")
        try:
            error, result = torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)
        except EOFError:
            raise AssertionError(f"rank {rank} died") from None
        assert error is None, f"rank {rank}:\n{error}"
        results.append(result)
    return results


def _rank(connection: Connection, store: str, rank: int, world: int, *job: Any) -> None:
    timeout, backend, body, args = job
    faulthandler.enable(file=sys.__stderr__)  # a rank that crashes shows where
    faulthandler.dump_traceback_later(timeout, exit=True, file=sys.__stderr__)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            backend=backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        said = (None, body(*args))
    except BaseException:
        said = (traceback.format_exc(), None)
    try:
        # Whole, as bytes: a shared-memory handle would outlive the rank that holds it.
        buffer = io.BytesIO()
        torch.save(said, buffer)
        connection.send_bytes(buffer.getvalue())
    finally:
        connection.close()
        if dist.is_initialized():
            dist.destroy_process_group()
