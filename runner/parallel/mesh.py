"""The device mesh: which ranks share pipelines, data, experts and weights.

Ranks that communicate most (tensor) are neighbours; ``ep`` neighbouring data-parallel ranks share
one set of experts. README.md says what a mixture of experts is.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runner.config.notation import plural


class SizeError(ValueError):
    """Sizes that do not multiply to the number of ranks; ``key`` is the one to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class MeshSizes(NamedTuple):
    """Number of ranks along each axis of the device mesh; dp · tp · pp is the world size."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def of(
        cls,
        ranks: int,
        dp_size: int | None = None,
        tp_size: int | None = 1,
        pp_size: int | None = 1,
        ep_size: int | None = 1,
    ) -> MeshSizes:
        """Divide ``ranks``; the first of tp, pp and dp that is None takes the remaining ranks."""
        sizes: dict[str, int] = {}
        open_axes: list[str] = []
        for name, size in (("tp_size", tp_size), ("pp_size", pp_size), ("dp_size", dp_size)):
            sizes[name] = 1 if size is None else size
            if size is None:
                open_axes.append(name)
        product = prod(sizes.values())
        if ranks % product or (not open_axes and ranks != product):
            factors = [f"{name} {size}" for name, size in sizes.items() if size > 1]
            text = f"{' x '.join(factors)} = {product}" if factors else "one: plugin=ddp takes more"
            many = "a multiple of " if open_axes else ""
            raise SizeError("nproc", f"{plural(ranks, 'rank')} cannot be {many}{text}")
        if open_axes:
            sizes[open_axes[0]] = ranks // product
        dp = sizes["dp_size"]
        ep = ep_size or dp
        if dp % ep:
            message = f"{ep} ranks cannot share the experts of {dp} data-parallel ranks evenly"
            raise SizeError("ep_size", message)
        return cls(dp=dp, tp=sizes["tp_size"], pp=sizes["pp_size"], ep=ep)


# Meshes by what they were made of, each with the world that it was made in.
_made: dict[Any, tuple[Any, DeviceMesh]] = {}


def grid(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a device mesh of all ranks, once for the same arguments: groups keep threads."""
    key = (device_type, shape, names)
    if key not in _made or _made[key][0] is not dist.group.WORLD:
        _made[key] = dist.group.WORLD, init_device_mesh(device_type, shape, mesh_dim_names=names)
    return _made[key][1]


class Axes(NamedTuple):
    """Slices of the device mesh of a plugin, to each of which this rank belongs."""

    pp: DeviceMesh  # ranks that hold the stages of one pipeline
    dp: DeviceMesh  # data-parallel ranks
    edp: DeviceMesh  # data-parallel ranks that hold the same experts
    ep: DeviceMesh  # data-parallel ranks that share one set of experts
    tp: DeviceMesh  # ranks that hold shards of the same weights

    @classmethod
    def of(cls, device_type: str, sizes: MeshSizes) -> Axes:
        """Make the device mesh of all ranks, and return its slices; a collective."""
        shape = (sizes.pp, sizes.dp // sizes.ep, sizes.ep, sizes.tp)
        mesh = grid(device_type, shape, ("pp", "edp", "ep", "tp"))
        data = mesh["edp", "ep"]._flatten("dp")
        return cls(mesh["pp"], data, mesh["edp"], mesh["ep"], mesh["tp"])


def position(rank: int, sizes: MeshSizes) -> tuple[int, int, int]:
    """Return the pipeline-, data- and tensor-parallel rank of a rank of the whole mesh."""
    return rank // (sizes.dp * sizes.tp), rank // sizes.tp % sizes.dp, rank % sizes.tp


def mixtures(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the mixtures of experts by name: modules with ``experts`` and a method ``spread``."""
    for name, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.ModuleList) and callable(getattr(module, "spread", None)):
            yield name, module


def of_experts(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers of all experts."""
    names = []
    for mixture, module in mixtures(model):
        experts = module.get_submodule("experts")
        for name, _ in (*experts.named_parameters(), *experts.named_buffers()):
            names.append(f"{mixture}.experts.{name}")
    return frozenset(names)


def split_parameters(
    model: nn.Module, experts: frozenset[str]
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the parameters by name: first all outside of experts, then the experts' own."""
    named = dict(model.named_parameters())
    expert = {name: named.pop(name) for name in list(named) if name in experts}
    return named, expert


def spread_experts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Keep on each rank of ``group`` only its experts of every mixture."""
    for _, module in list(mixtures(model)):
        experts = list(module.get_submodule("experts").children())
        with_parameters = [e for e in experts if next(e.parameters(), None) is not None]
        module.spread(group)  # type: ignore[operator]
        for expert in with_parameters:
            if next(expert.parameters(), None) is None:  # it lives on another rank
                for part in expert.modules():
                    part._buffers.update(dict.fromkeys(part._buffers))
