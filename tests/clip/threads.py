"""Ranks as threads of one process, for the collectives that clipping uses.

Real ranks are in ``tests/distributed``. These cost nothing, so that a test can put each element of
a model where it wants, and a tool that follows calls in one process sees them.
"""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist


class Ranks:
    """A process group whose ranks are threads."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._here = threading.local()
        self._barrier = threading.Barrier(world, timeout=120)
        self._sent: list[Any] = [None] * world

    def size(self) -> int:
        return self.world

    def rank(self) -> int:
        return self._here.rank

    def everyone(self, mine: Any) -> list[Any]:
        """What each rank sends, on every rank."""
        self._sent[self.rank()] = mine
        self._barrier.wait()
        sent = list(self._sent)
        self._barrier.wait()
        return sent

    def run(self, body: Callable[["Ranks"], Any]) -> list[Any]:
        """What ``body`` returns on each rank."""
        results: list[Any] = [None] * self.world
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            self._here.rank = rank
            try:
                results[rank] = body(self)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        def all_to_all_single(rows: Any, sent: Any, group: Any, async_op: bool) -> None:
            columns = [each.chunk(self.world) for each in group.everyone(sent.clone())]
            torch.cat([parts[self.rank()] for parts in columns], out=rows)

        def all_reduce(tensor: Any, group: Any) -> None:
            tensor.copy_(sum(group.everyone(tensor.clone())))

        def all_gather_object(objects: list[Any], mine: Any, group: Any) -> None:
            objects[:] = group.everyone(mine)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world)]
        with (
            patch.object(dist, "all_to_all_single", all_to_all_single),
            patch.object(dist, "all_reduce", all_reduce),
            patch.object(dist, "all_gather_object", all_gather_object),
        ):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return results
