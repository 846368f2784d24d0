"""Parameters that several pipeline stages use: stages have copies, whose gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from runner.clip.shard import local
from runner.parallel.buckets import on_any_rank
from runner.parallel.mesh import Axes


@dataclass(frozen=True)
class Tied:
    """Copies of one parameter.

    Attributes:
        copies: copies on this rank.
        group: ranks that have copies; None if all copies are on this rank.
    """

    copies: Sequence[nn.Parameter]
    group: dist.ProcessGroup | None


def tied_copies(
    model: nn.Module, copies: Mapping[str, Sequence[int]], renamed: Mapping[str, str], axes: Axes
) -> list[Tied]:
    """Return the copies on this rank of each parameter that several stages use.

    Every rank has to call this, because torch numbers process groups by counting them. ``copies``
    and ``renamed`` are those of :class:`runner.parallel.own_stages.OwnStages`.
    """
    found = []
    for name, where in copies.items():
        group = _group(sorted(set(where)), axes)
        here = [p for path, p in model.named_parameters() if renamed.get(path, path) == name]
        if here:
            found.append(Tied(here, group))
    return found


def _group(pipeline_ranks: Sequence[int], axes: Axes) -> dist.ProcessGroup | None:
    if len(pipeline_ranks) == axes.pp.size():
        return axes.pp.get_group()
    if len(pipeline_ranks) == 1:
        return None
    pipelines = axes.dp.size() * axes.tp.size()
    own, _ = dist.new_subgroups_by_enumeration(
        [[rank * pipelines + i for rank in pipeline_ranks] for i in range(pipelines)]
    )
    return own if isinstance(own, dist.ProcessGroup) else None


@torch.no_grad()
def sum_copies(tied: Tied) -> None:
    """Give all copies of a parameter the sum of their gradients."""
    copies = [p for p in tied.copies if p.requires_grad]
    if not copies:
        return
    if not any(on_any_rank([any(p.grad is not None for p in copies)], tied.group)):
        return
    for parameter in copies:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [local(p.grad) for p in copies if p.grad is not None]
    summed = torch.stack(gradients).sum(0) if len(gradients) > 1 else gradients[0].contiguous()
    if tied.group is not None:
        dist.all_reduce(summed, group=tied.group)
    for gradient in gradients:
        gradient.copy_(summed)
