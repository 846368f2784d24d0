"""Gather the state of the whole model on the first rank, and load it from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.clip.shard import local
from runner.config.notation import first_few
from runner.parallel.placements import full, sharded


def gathered(
    model: nn.Module,
    renamed: Mapping[str, str],
    of: Callable[[nn.Parameter], Tensor | None] | None = None,
) -> dict[str, Tensor]:
    """Gather tensors of the whole model, by their names in it, on the host of the first rank.

    Every rank has to call it. One copy of each tensor is sent.
    """
    here: dict[str, Tensor] = {}
    for own, parameter in model.named_parameters():
        wanted = parameter.detach() if of is None else of(parameter)
        if wanted is not None:
            here[renamed.get(own, own)] = wanted
    if of is None:
        here |= dict(model.named_buffers())
    return gather(here)


def gather(here: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather whole tensors on the host of the first rank; every rank has to call this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {name: _on_host(full(tensor)) for name, tensor in here.items()}
    names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names, list(here))
    rank = dist.get_rank()
    lower = {name for others in names[:rank] for name in others}
    mine = {}
    for name, tensor in here.items():
        whole = full(tensor)
        if name not in lower:
            mine[name] = _on_host(whole)
    parts: list[dict[str, Tensor]] | None = [{} for _ in names] if rank == 0 else None
    dist.gather_object(mine, parts, dst=0)
    return {name: tensor for part in parts or () for name, tensor in part.items()}


@torch.no_grad()
def load(
    model: nn.Module,
    renamed: Mapping[str, str],
    names: Mapping[str, str],
    state: Mapping[str, Tensor],
) -> None:
    """Load a state dict of the whole model, which only the first rank reads.

    Every rank has to call it. One tensor is sent at a time.
    """
    here: dict[str, list[Tensor]] = {}
    for own, tensor in (*model.named_parameters(), *model.named_buffers()):
        here.setdefault(renamed.get(own, own), []).append(tensor)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    known = {name: (held[0].shape, held[0].dtype) for name, held in here.items()}
    if not alone:
        listed: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(listed, known)
        known = {name: kind for part in listed for name, kind in part.items()}
    first = alone or dist.get_rank() == 0
    given: dict[str, Tensor] = {}
    found = [""]
    if first:
        try:
            given = {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}
            found = [_problems(given, names, {name: shape for name, (shape, _) in known.items()})]
        except Exception as error:  # The other ranks wait for the result.
            found = [f"{type(error).__name__}: {error}"]
    if not alone:
        dist.broadcast_object_list(found, src=0)
    if found[0]:
        raise ValueError(f"this state does not fit the model: {found[0]}")
    device = next((held[0].device for held in here.values()), torch.device("cpu"))
    for name in dict.fromkeys(names.values()):
        shape, dtype = known[name]
        if first:
            whole = given[name].detach().to(device, dtype).contiguous()
        else:
            whole = torch.empty(shape, dtype=dtype, device=device)
        if not alone:
            dist.broadcast(whole, src=0)
        for tensor in here.get(name, ()):
            part = whole
            if isinstance(tensor, DTensor):
                part = sharded(whole, tensor.device_mesh, tensor.placements)
            local(tensor).copy_(local(part))


def _problems(
    state: Mapping[str, Any], names: Mapping[str, str], shapes: Mapping[str, torch.Size]
) -> str:
    """Return what is wrong with a state dict; empty if it fits the model."""
    found = []
    missing = [name for name in names if name not in state]
    unexpected = [name for name in state if name not in names]
    if missing:
        found.append(f"missing: {first_few(missing)}")
    if unexpected:
        found.append(f"unexpected: {first_few(unexpected)}")
        if all(name.startswith("module.") and name[7:] in names for name in unexpected):
            found.append("take the state of the model inside the wrapper: wrapper.module")
    for name, tensor in state.items():
        if name not in names:
            continue
        first, shape = names[name], shapes[names[name]]
        if not isinstance(tensor, Tensor):
            found.append(f"{name} is no tensor, but of class {type(tensor).__name__}")
        elif tensor.shape != shape:
            found.append(f"{name} has shape {list(tensor.shape)} instead of {list(shape)}")
        elif name == first or not isinstance(state.get(first), Tensor):
            continue
        elif not torch.equal(tensor, state[first]):
            found.append(f"{name} is {first} in the model, but has other values")
    return "; ".join(found)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()
