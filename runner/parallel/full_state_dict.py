"""A whole model from what the ranks hold of it, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


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
def load(
    model: nn.Module,
    renamed: Mapping[str, str],
    names: Mapping[str, str],
    state: Mapping[str, Tensor],
) -> None:
    """Copy a state dict of the whole model, read on the first rank, to what each rank holds.

    Every rank has to call it. One tensor travels at a time.

    Args:
        model: what this rank holds of the model.
        renamed: the name in the whole model by another name that a parameter has here.
        names: all names in the state dict of the whole model; for each the first one of the same
            tensor.
        state: the state dict.

    Raises:
        ValueError: names or shapes are not those of the model.
    """
    here: dict[str, list[Tensor]] = {}
    for own, tensor in (*model.named_parameters(), *model.named_buffers()):
        here.setdefault(renamed.get(own, own), []).append(tensor)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    kinds = {name: (held[0].shape, held[0].dtype) for name, held in here.items()}
    listed = [kinds]
    if not alone:
        listed = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(listed, kinds)
    known = {name: kind for part in listed for name, kind in part.items()}
    first = alone or dist.get_rank() == 0
    given: dict[str, Tensor] = {}
    found = [""]
    if first:
        try:
            given = {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}
            found = [_problems(given, names, {name: shape for name, (shape, _) in known.items()})]
        except Exception as error:  # The other ranks wait for what is said.
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
            _copy(tensor, whole)


def _copy(tensor: Tensor, whole: Tensor) -> None:
    """Copy to ``tensor``, of a DTensor to the part on this rank."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole)
        return
    mesh = tensor.device_mesh
    replica = DTensor.from_local(
        whole.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    # Each rank cuts its own part: no communication.
    tensor.to_local().copy_(replica.redistribute(mesh, tensor.placements).to_local())


def _problems(
    state: Mapping[str, Any], names: Mapping[str, str], shapes: Mapping[str, torch.Size]
) -> str:
    """What is wrong with a state dict; empty if nothing is."""
    found = []
    missing = [name for name in names if name not in state]
    unexpected = [name for name in state if name not in names]
    if missing:
        found.append(f"missing: {_some(missing)}")
    if unexpected:
        found.append(f"unexpected: {_some(unexpected)}")
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


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"


@torch.no_grad()
def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()
