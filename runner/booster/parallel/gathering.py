"""A whole model from what the ranks hold of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gathered(
    model: nn.Module,
    renamed: Mapping[str, str],
    of: Callable[[nn.Parameter], Tensor | None] | None = None,
) -> dict[str, Tensor]:
    """Tensors of the whole model, by their names in it, on the host of the first rank.

    Every rank has to call it. One copy of each tensor travels.

    Args:
        model: what this rank holds of the model.
        renamed: the name in the whole model by another name that a parameter has here.
        of: what is wanted of each parameter (its gradient, say), None where there is nothing; by
            default parameters and buffers themselves.

    Returns:
        The tensors on the first rank, nothing on the others.
    """
    here: dict[str, Tensor] = {}
    for own, parameter in model.named_parameters():
        wanted = parameter.detach() if of is None else of(parameter)
        if wanted is not None:
            here[renamed.get(own, own)] = wanted
    if of is None:
        here |= dict(model.named_buffers())
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {name: _on_host(_whole(tensor)) for name, tensor in here.items()}
    names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names, list(here))
    rank = dist.get_rank()
    lower = {name for others in names[:rank] for name in others}
    mine = {}
    for name, tensor in here.items():
        whole = _whole(tensor)
        if name not in lower:
            mine[name] = _on_host(whole)
    parts: list[dict[str, Tensor]] | None = None
    if rank == 0:
        parts = [{} for _ in names]
    dist.gather_object(mine, parts, dst=0)
    return {name: tensor for part in parts or () for name, tensor in part.items()}


@torch.no_grad()
def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()
