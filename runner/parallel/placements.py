"""Whole tensors of DTensors, and DTensors of whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate


@torch.no_grad()
def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor, as a collective of its mesh; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def sharded(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor of a tensor that all ranks of ``mesh`` have, without communication."""
    replicated = [Replicate()] * mesh.ndim
    replica = DTensor.from_local(whole.to(mesh.device_type), mesh, replicated, run_check=False)
    return replica.redistribute(mesh, placements)
