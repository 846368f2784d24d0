"""Whole tensors of a model on the first rank: gathered from all ranks, and sent to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.config.notation import first_few
from runner.gradients.shard import local
from runner.parallel.collectives import (
    buckets,
    from_all,
    full,
    is_first,
    on_first,
    several_ranks,
    sharded,
)


@torch.no_grad()
def gathered(
    model: nn.Module,
    renamed: Mapping[str, str],
    of: Callable[[nn.Parameter], Tensor | None] | None = None,
) -> dict[str, Tensor]:
    """Gather tensors of the whole model on the host of the first rank, by their names in it.

    ``of`` returns the tensor to gather for each parameter; without it, parameters and buffers are
    gathered. One copy of each tensor is sent; all ranks call this.
    """
    tensors = _named_tensors(model, renamed, of)
    names = from_all(list(tensors))
    rank = dist.get_rank() if several_ranks() else 0
    of_lower_ranks = {name for names_of_rank in names[:rank] for name in names_of_rank}
    mine = {}
    for name, tensor in tensors.items():
        whole = full(tensor)  # a collective, also for a tensor that a lower rank sends
        if name not in of_lower_ranks:
            mine[name] = whole.detach().cpu().clone()
    if not several_ranks():
        return mine
    parts: list[dict[str, Tensor]] | None = [{} for _ in names] if rank == 0 else None
    dist.gather_object(mine, parts, dst=0)
    return {name: tensor for part in parts or () for name, tensor in part.items()}


def _named_tensors(
    model: nn.Module,
    renamed: Mapping[str, str],
    of: Callable[[nn.Parameter], Tensor | None] | None,
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for local_name, parameter in model.named_parameters():
        tensor = parameter if of is None else of(parameter)
        if tensor is not None:
            tensors[renamed.get(local_name, local_name)] = tensor
    if of is None:
        tensors |= model.named_buffers()
    return tensors


@torch.no_grad()
def load(
    slots: Mapping[str, Sequence[Tensor]],
    names: Mapping[str, str],
    state: Mapping[str, Tensor],
    strict: bool = True,
) -> None:
    """Load a state dict of the whole model, which only the first rank reads.

    Every rank calls this. One tensor is sent at a time.

    Args:
        slots: the copies of each tensor on this rank, by name.
        names: each name in the model, with the first name of its tensor.
        state: the state dict.
        strict: whether to refuse names that only the model, or only the state dict, has.

    Raises:
        ValueError: on every rank; the state does not fit the model.
    """
    kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for of_rank in from_all({name: (t[0].shape, t[0].dtype) for name, t in slots.items()}):
        kinds |= of_rank
    renamed: dict[str, Tensor] = {}  # the state, without the prefix of a compiled model

    def check() -> list[str]:
        for name, tensor in state.items():
            renamed[name.replace("_orig_mod.", "")] = tensor
        shapes = {name: shape for name, (shape, _) in kinds.items()}
        problems = "; ".join(_problems(renamed, names, shapes, strict))
        if problems:
            raise ValueError(f"this state does not fit the model: {problems}")
        return [name for name in dict.fromkeys(names.values()) if name in renamed]

    to_load = on_first(check)
    device = next((tensors[0].device for tensors in slots.values()), torch.device("cpu"))
    for name in to_load:
        shape, dtype = kinds[name]
        if is_first():
            whole = renamed[name].detach().to(device, dtype).contiguous()
        else:
            whole = torch.empty(shape, dtype=dtype, device=device)
        if several_ranks():
            dist.broadcast(whole, src=0)
        for tensor in slots.get(name, ()):
            _copy_part(whole, tensor)


def _copy_part(whole: Tensor, tensor: Tensor) -> None:
    """Copy to a tensor its elements of the whole one."""
    part = whole
    if isinstance(tensor, DTensor):
        part = sharded(whole, tensor.device_mesh, tensor.placements)
    local(tensor).copy_(local(part))


class FirstRankValues:
    """The values of the model on the first rank, of which each rank gets its parts after the split.

    Args:
        model: the whole model, before it is split. Only the first rank reads its values, so other
            ranks may hold memory that was never written.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._buffers = dict(model.named_buffers())
        self._tensors: dict[str, Tensor] = {**parameters, **self._buffers}
        names = {id(buffer): name for name, buffer in self._buffers.items()}
        self._places: list[tuple[str, nn.Module, str]] = []  # of each buffer, also of a shared one
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    self._places.append((names[id(buffer)], module, key))

    @torch.no_grad()
    def fill(self, model: nn.Module, renamed: Mapping[str, str], device: torch.device) -> None:
        """Give the tensors of ``model``, this rank's part, their values on ``device``.

        Every rank calls this. At most one parameter, or a few small ones, are whole at a time.
        """
        slots = self._parameters_of_rank(model, renamed, device)
        slots |= self._buffers_of_rank(device)
        names = {id(tensor): name for name, tensor in self._tensors.items()}
        to_send = [tensor for tensor in self._tensors.values() if tensor.numel()]
        for bucket in buckets(to_send):
            for tensor, whole in zip(bucket, _from_first(bucket, device), strict=True):
                for part in slots.get(names[id(tensor)], ()):
                    _copy_part(whole, part)

    def _parameters_of_rank(
        self, model: nn.Module, renamed: Mapping[str, str], device: torch.device
    ) -> dict[str, list[Tensor]]:
        """Return the parameters of this rank by their names in the whole model, on ``device``."""
        parameters: dict[str, list[Tensor]] = {}
        for local_name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor) and parameter.device != device:
                parameter.data = torch.empty_like(parameter, device=device)
            parameters.setdefault(renamed.get(local_name, local_name), []).append(parameter)
        return parameters

    def _buffers_of_rank(self, device: torch.device) -> dict[str, list[Tensor]]:
        """Return the buffers of this rank by their names in the whole model, on ``device``."""
        on_device: dict[str, Tensor] = {}
        for name, module, key in self._places:
            if module._buffers[key] is None:  # it belongs to another rank
                continue
            buffer = self._buffers[name]
            if name not in on_device:
                moves = buffer.device != device
                on_device[name] = torch.empty_like(buffer, device=device) if moves else buffer
            module._buffers[key] = on_device[name]
        return {name: [buffer] for name, buffer in on_device.items()}


def _from_first(bucket: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the values that the first rank has for tensors of one dtype; every rank calls this."""
    if is_first():
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(device)
    else:
        elements = sum(tensor.numel() for tensor in bucket)
        flat = torch.empty(elements, dtype=bucket[0].dtype, device=device)
    if several_ranks():
        dist.broadcast(flat.view(torch.uint8), src=0)  # bytes: a dtype need not be known to gloo
    sizes = [tensor.numel() for tensor in bucket]
    parts = torch.split(flat, sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)]


def _problems(
    state: Mapping[str, Any],
    names: Mapping[str, str],
    shapes: Mapping[str, torch.Size],
    strict: bool,
) -> Iterator[str]:
    """Yield how a state dict differs from the model, by names if ``strict``, and by shapes."""
    if strict:
        missing = [name for name in names if name not in state]
        unexpected = [name for name in state if name not in names]
        if missing:
            yield f"missing: {first_few(missing)}"
        if unexpected:
            yield f"unexpected: {first_few(unexpected)}"
    for name, tensor in state.items():
        if name not in names:
            continue
        first = names[name]
        shape = shapes[first]
        if not isinstance(tensor, Tensor):
            yield f"{name} is no tensor, but of class {type(tensor).__name__}"
        elif tensor.shape != shape:
            yield f"{name} has shape {list(tensor.shape)} instead of {list(shape)}"
        elif isinstance(state.get(first), Tensor) and not torch.equal(tensor, state[first]):
            yield f"{name} is {first} in the model, but has other values"
