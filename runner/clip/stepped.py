"""Which optimizer steps which shard, and on how many ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from runner.gradients import Layout, ParamShard, transfer


class Place(NamedTuple):
    """The optimizer that steps a shard on this rank, and the parameter group of the shard."""

    optimizer: Optimizer
    group: dict[str, Any]


class SteppedShards:
    """The shards that the optimizers of this rank step; made by all ranks, by one collective.

    With ZeRO 1 only some of the ranks that have an element step it.

    Attributes:
        copies: by the name of a parameter, the number of ranks that step each of its elements; 0
            for a parameter without an optimizer.
    """

    def __init__(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        # Groups are noted by number, because loading a state makes new groups.
        self._places = {
            id(parameter): (optimizer, number)
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        stepped_here = [0.0] * len(layout.names)
        for shard in layout.shards:
            if shard in self:
                stepped_here[layout.positions[shard.name]] += shard.weight.numel()
        row = transfer.on_device(stepped_here, layout.device)
        stepped: list[float] = layout.sum(row).tolist()
        self.copies: dict[str, float] = {}
        for (name, parameter), elements in zip(layout.parameters.items(), stepped, strict=True):
            self.copies[name] = elements / max(1, math.prod(parameter.shape))

    def __contains__(self, shard: ParamShard) -> bool:
        return id(shard.param) in self._places

    def place(self, shard: ParamShard) -> Place | None:
        """Return what steps a shard on this rank; None where another rank steps it."""
        if shard not in self:
            return None
        optimizer, number = self._places[id(shard.param)]
        return Place(optimizer, optimizer.param_groups[number])

    def weight(self, shard: ParamShard) -> float:
        """Return 1 ÷ the ranks that count a shard: those that step it, or all that have it."""
        copies = self.copies[shard.name]
        if not copies:
            return 1.0 / shard.num_replicas
        return 1.0 / copies if shard in self else 0.0
