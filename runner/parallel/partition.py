"""ZeRO stage 1: each rank steps some of the parameters, and broadcasts them.

Rajbhandari et al. 2020 (arXiv 1910.02054, section 5.1). Whole parameters are assigned to ranks,
largest first, each to the rank with the fewest elements. So any optimizer works: it sees whole
tensors, and its state is that of the assigned parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from runner.clip.shard import local
from runner.parallel.buckets import broadcast
from runner.parallel.gradient_sync import Replicas


class Partition:
    """Assignment of parameters to the ranks that step them.

    Attributes:
        mine: ids of the parameters that this rank steps.
    """

    def __init__(self, replicas: Sequence[Replicas]) -> None:
        self._shares: list[tuple[dist.ProcessGroup, list[list[nn.Parameter]]]] = []
        mine: set[int] = set()
        for each in replicas:
            assert each.group is not None
            shares = _assign(each.parameters, each.group.size())
            mine.update(id(parameter) for parameter in shares[each.group.rank()])
            self._shares.append((each.group, shares))
        self.mine = frozenset(mine)

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Send the parameters that this rank stepped, and receive all others."""
        for group, shares in self._shares:
            for owner, parameters in enumerate(shares):
                stepped = [local(p).detach() for p in parameters if p.requires_grad]
                broadcast(stepped, group, owner)


def _assign(parameters: Sequence[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """Divide parameters into shares of about equal size, the same on every rank."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        least = loads.index(min(loads))
        shares[least].append(parameter)
        loads[least] += parameter.numel()
    return shares
