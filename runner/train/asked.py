"""What one rank asks of all ranks: to stop, or to save a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class Asked(NamedTuple):
    """What is asked for after the optimizer step that begins."""

    stop: int = 0
    save: bool = False
    failed: bool = False

    def counts(self) -> list[float]:
        """Return numbers whose sums over ranks :meth:`of_all` takes."""
        return [self.stop > 0, self.save, self.failed]

    def of_all(self, sums: Sequence[float]) -> Asked:
        """Return what some rank asks for, the same on every rank."""
        asked_to_stop, due, failed = sums
        stop = 0
        if asked_to_stop:
            number = torch.tensor(self.stop)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            stop = int(number)
        return Asked(stop, due > 0, failed > 0)


NOTHING = Asked()
