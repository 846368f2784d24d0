"""Whole tensors: of DTensors, and of a whole model on the first rank, from and to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from runner.clip.shard import local
from runner.config.notation import first_few
from runner.parallel.collectives import is_first, on_first, several_ranks


@torch.no_grad()
def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def sharded(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor of a tensor that all ranks of ``mesh`` have, without communication."""
    replicated = [Replicate()] * mesh.ndim
    replica = DTensor.from_local(whole.to(mesh.device_type), mesh, replicated, run_check=False)
    return replica.redistribute(mesh, placements)


@torch.no_grad()
def gathered(
    model: nn.Module,
    renamed: Mapping[str, str],
    of: Callable[[nn.Parameter], Tensor | None] | None = None,
) -> dict[str, Tensor]:
    """Gather tensors of the whole model on the host of the first rank, by their names in it.

    ``of``: what to gather of each parameter; by default the parameters and the buffers. One copy of
    each tensor is sent; all ranks call this.
    """
    here: dict[str, Tensor] = {}
    for own, parameter in model.named_parameters():
        tensor = parameter if of is None else of(parameter)
        if tensor is not None:
            here[renamed.get(own, own)] = tensor
    here |= model.named_buffers() if of is None else {}
    rank, names = 0, [list(here)]
    if several_ranks():
        rank, names = dist.get_rank(), [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(names, list(here))
    lower = {name for others in names[:rank] for name in others}
    mine = {}
    for name, tensor in here.items():
        whole = full(tensor)  # a collective, also for a tensor that a lower rank sends
        if name not in lower:
            mine[name] = whole.detach().cpu().clone()
    if not several_ranks():
        return mine
    parts: list[dict[str, Tensor]] | None = [{} for _ in names] if rank == 0 else None
    dist.gather_object(mine, parts, dst=0)
    return {name: tensor for part in parts or () for name, tensor in part.items()}


@torch.no_grad()
def load(
    model: nn.Module,
    renamed: Mapping[str, str],
    names: Mapping[str, str],
    state: Mapping[str, Tensor],
    strict: bool = True,
) -> None:
    """Load a state dict of the whole model, which only the first rank reads.

    ``names``: each name of the model, with the first name of its tensor. Every rank has to call
    this. One tensor is sent at a time.
    """
    here: dict[str, list[Tensor]] = {}
    for own, tensor in (*model.named_parameters(), *model.named_buffers()):
        here.setdefault(renamed.get(own, own), []).append(tensor)
    listed: list[Any] = [{name: (held[0].shape, held[0].dtype) for name, held in here.items()}]
    if several_ranks():
        known, listed = listed[0], [None] * dist.get_world_size()
        dist.all_gather_object(listed, known)
    kinds = {name: kind for part in listed for name, kind in part.items()}
    given: dict[str, Tensor] = {}

    def check() -> tuple[list[str], str]:
        try:
            given.update((name.replace("_orig_mod.", ""), t) for name, t in state.items())
            found = "; ".join(
                _problems(given, names, {n: s for n, (s, _) in kinds.items()}, strict)
            )
        except Exception as error:  # one message on all ranks
            found = f"{type(error).__name__}: {error}"
        return [name for name in dict.fromkeys(names.values()) if name in given], found

    wanted, problems = on_first(check)
    if problems:
        raise ValueError(f"this state does not fit the model: {problems}")
    device = next((held[0].device for held in here.values()), torch.device("cpu"))
    for name in wanted:
        shape, dtype = kinds[name]
        if is_first():
            whole = given[name].detach().to(device, dtype).contiguous()
        else:
            whole = torch.empty(shape, dtype=dtype, device=device)
        if several_ranks():
            dist.broadcast(whole, src=0)
        for tensor in here.get(name, ()):
            part = whole
            if isinstance(tensor, DTensor):
                part = sharded(whole, tensor.device_mesh, tensor.placements)
            local(tensor).copy_(local(part))


def _problems(
    state: Mapping[str, Any],
    names: Mapping[str, str],
    shapes: Mapping[str, torch.Size],
    strict: bool,
) -> Iterator[str]:
    missing = [name for name in names if name not in state]
    unexpected = [name for name in state if name not in names]
    if strict and missing:
        yield f"missing: {first_few(missing)}"
    if strict and unexpected:
        yield f"unexpected: {first_few(unexpected)}"
    for name, tensor in state.items():
        if name not in names:
            continue
        first, shape = names[name], shapes[names[name]]
        if not isinstance(tensor, Tensor):
            yield f"{name} is no tensor, but of class {type(tensor).__name__}"
        elif tensor.shape != shape:
            yield f"{name} has shape {list(tensor.shape)} instead of {list(shape)}"
        elif isinstance(state.get(first), Tensor) and not torch.equal(tensor, state[first]):
            yield f"{name} is {first} in the model, but has other values"
