"""ZeRO stage 1: each rank steps its share of the parameters and sends them to the others.

Rajbhandari et al. 2020 (arXiv 1910.02054, section 5.1). Whole parameters are dealt out, the largest
first to the rank that has least; so the optimizer sees tensors as they are, any optimizer will do,
and its state is that of the share alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from runner.clip.layout import local
from runner.parallel.gradient_sync import Replicas, buckets, put_back


class Partition:
    """Who steps what.

    Args:
        replicas: parameters with the ranks that hold copies of them.

    Attributes:
        mine: ids of the parameters that this rank steps.
    """

    def __init__(self, replicas: Sequence[Replicas]) -> None:
        self._shares: list[tuple[dist.ProcessGroup, list[list[nn.Parameter]]]] = []
        mine: set[int] = set()
        for group, parameters in ((r.group, r.parameters) for r in replicas):
            assert group is not None
            shares = _deal(parameters, group.size())
            mine.update(id(parameter) for parameter in shares[group.rank()])
            self._shares.append((group, shares))
        self.mine = frozenset(mine)

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Send what this rank stepped, and take what the others did."""
        for group, shares in self._shares:
            if group.size() == 1:
                continue
            for owner, parameters in enumerate(shares):
                stepped = [local(p.detach()) for p in parameters if p.requires_grad]
                for bucket in buckets(stepped):
                    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                    dist.broadcast(flat, group=group, group_src=owner)
                    if owner != group.rank():
                        put_back(flat, bucket)


def _deal(parameters: Sequence[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """Shares of about as many elements each; the same on every rank."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        least = loads.index(min(loads))
        shares[least].append(parameter)
        loads[least] += parameter.numel()
    return shares
