"""What clipping by hand would have seen: torch's own norm of the gradients that a rank holds."""

from __future__ import annotations

import math
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
    """``torch.nn.utils.get_total_norm`` of this rank's gradients, as a user would call it.

    Every rank has to call this, with gradients that are final and not yet clipped.

    Args:
        layout: where this rank's gradients are.
        norm_type: p of the norm.

    Returns:
        What came out; None where there is one process, or where the call would wait for ranks that
        do not make it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    gradients = [p.param.grad for p in layout.shards if p.param.grad is not None]
    if not _comes_back(gradients):
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
    """The outcome that is furthest from ``norm``, ‖G‖ of one process; one that raised before all.

    Args:
        outcomes: of all ranks.
        norm: the right one.
    """
    made = [
        one if one.norm is None else replace(one, error=_off(one.norm, norm))
        for one in outcomes
        if one is not None
    ]
    return max(made, key=lambda one: (one.raised is not None, one.error), default=None)


def _off(norm: float, reference: float) -> float:
    return math.inf if math.isnan(norm) else relative(norm, reference)


def _comes_back(gradients: Sequence[Tensor]) -> bool:
    """Whether the call returns or raises.

    On gradients of one mesh it has collectives, for which all ranks of the mesh must call it on
    gradients of that mesh alone. On a mixture of meshes and plain tensors it raises before any.
    """
    homes = {_home(gradient) for gradient in gradients}
    everywhere: list[set[tuple[int, ...] | str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, homes)
    if len(homes) != 1:
        return True
    [home] = homes
    return home == PLAIN or all(everywhere[int(rank)] == homes for rank in home)


def _home(gradient: Tensor) -> tuple[int, ...] | str:
    """The ranks of a gradient's mesh."""
    if not isinstance(gradient, DTensor):
        return PLAIN
    return tuple(gradient.device_mesh.mesh.flatten().tolist())
