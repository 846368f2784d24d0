"""PyTorch's own norm of one rank's gradients, to compare with the norm of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner.clip import Layout
from runner.verify.comparison import Naive, relative

PLAIN = "plain"


def rank_local(layout: Layout, norm_type: float) -> Naive | None:
    """Call ``torch.nn.utils.get_total_norm`` on this rank's gradients."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    gradients = [p.param.grad for p in layout.shards if p.param.grad is not None]
    if not _returns(gradients):
        return None
    rank = dist.get_rank()
    try:
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Naive(None, type(error).__name__, lines[0] if lines else "", rank=rank)
    return Naive(float(whole), rank=rank)


def worst(outcomes: Sequence[Naive | None], norm: float) -> Naive | None:
    """Return the result with the largest error; one that raised has the largest of all."""
    made = [
        one if one.norm is None else replace(one, error=relative(one.norm, norm))
        for one in outcomes
        if one is not None
    ]
    return max(made, key=lambda one: (one.raised is not None, one.error), default=None)


def _returns(gradients: Sequence[Tensor]) -> bool:
    """Return False if ``get_total_norm`` would wait for other ranks for ever."""
    homes = {_home(gradient) for gradient in gradients}
    everywhere: list[set[tuple[int, ...] | str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, homes)
    if len(homes) != 1:
        return True
    [home] = homes
    return home == PLAIN or all(everywhere[int(rank)] == homes for rank in home)


def _home(gradient: Tensor) -> tuple[int, ...] | str:
    """Return the ranks of a gradient's mesh."""
    if not isinstance(gradient, DTensor):
        return PLAIN
    return tuple(gradient.device_mesh.mesh.flatten().tolist())
