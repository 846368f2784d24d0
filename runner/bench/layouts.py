"""Small models with gradients, spread over four ranks in the ways that people do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

RANKS = 4


@dataclass(frozen=True)
class Case:
    """A model with gradients that are averaged over ranks.

    ``groups`` has, for patterns of names, the ranks on which these parameters are different ones.
    """

    model: nn.Module
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)


def _net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    return nn.Sequential(*layers).to(dtype)


def _backward(model: nn.Module, seed: int, scale: float = 1.0) -> nn.Module:
    """Compute the gradient of samples that a seed draws."""
    first = next(model.parameters())
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).to(first.dtype)
    (scale * model(inputs).square().sum()).backward()
    return model


def _average(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad.div_(dist.get_world_size(group))


def _mesh(first: str, second: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(first, second))


def _ddp() -> Case:
    return Case(_backward(DistributedDataParallel(_net()), dist.get_rank()))


class _Branches(nn.Module):
    """A layer, and one of two others: the second rank of each pair leaves out the first one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.even = nn.Linear(8, 4)
        self.odd = nn.Linear(8, 4)
        self.never = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        branch = self.odd if dist.get_rank() % 2 else self.even
        outputs: Tensor = branch(self.first(inputs))
        return outputs


def _unused() -> Case:
    model = DistributedDataParallel(_Branches(), find_unused_parameters=True)
    return Case(_backward(model, dist.get_rank()))


def _fsdp() -> Case:
    model = _net()
    fully_shard(model[2])
    fully_shard(model)
    return Case(_backward(model, dist.get_rank()))


def _fsdp_beside_plain() -> Case:
    model = _net()
    plain = set(model[1].parameters())
    fully_shard(model[2], ignored_params=plain)
    fully_shard(model, ignored_params=plain)
    _backward(model, dist.get_rank())
    _average(model[1].parameters())
    return Case(model)


def _hsdp() -> Case:
    model = _net()
    fully_shard(model, mesh=_mesh("replicas", "shards"))
    return Case(_backward(model, dist.get_rank()))


def _tensor_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)
    return nn.Sequential(*layers)


def _plan() -> dict[str, Any]:
    return {"0": ColwiseParallel(), "2": RowwiseParallel()}


def _tensor() -> Case:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    model = parallelize_module(_tensor_net(), mesh, _plan())
    return Case(_backward(model, seed=1))


def _sequence() -> Case:
    """Return layers between norms that each rank applies to its part of the sequence."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    plan: dict[str, Any] = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    model = parallelize_module(layers, mesh, plan)
    generator = torch.Generator().manual_seed(dist.get_rank())
    part = torch.randn(3, 2, 6, generator=generator)
    model(part).square().sum().backward()
    return Case(model)


def _two_dimensions() -> Case:
    mesh = _mesh("data", "tensor")
    model = parallelize_module(_tensor_net(), mesh["tensor"], _plan())
    fully_shard(model, mesh=mesh["data"])
    return Case(_backward(model, mesh.get_local_rank("data")))


def _experts() -> Case:
    mesh = _mesh("replicas", "experts")
    number = mesh.get_local_rank("experts")
    torch.manual_seed(0)
    gate = nn.Linear(6, 6)
    torch.manual_seed(100 + number)
    model = nn.Sequential()
    model.add_module("gate", gate)
    model.add_module("expert", nn.Linear(6, 6))
    _backward(model, dist.get_rank(), scale=1.0 + 2.0 * number)
    _average(gate.parameters())
    _average(model.get_submodule("expert").parameters(), mesh.get_group("replicas"))
    return Case(model, {"expert.*": mesh.get_group("experts")})


def _tied() -> Case:
    """Return one of two stages, which share a matrix whose gradient was added up over both."""
    mesh = _mesh("replicas", "stages")
    stage = mesh.get_local_rank("stages")
    torch.manual_seed(0)
    shared = nn.Linear(6, 6, bias=False)
    torch.manual_seed(10 + stage)
    model = nn.Sequential()
    model.add_module("shared", shared)
    model.add_module("stage", nn.Linear(6, 6 + stage))
    _backward(model, seed=stage)
    _average(shared.parameters())
    return Case(model, {"stage.*": mesh.get_group("stages")})


def _bfloat16() -> Case:
    model = DistributedDataParallel(_net(torch.bfloat16))
    return Case(_backward(model, dist.get_rank()))


def _empty() -> Case:
    """Return a model with a parameter of no elements, which has a gradient of none."""
    net = _net()
    net.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    _backward(net, dist.get_rank())
    net.get_parameter("empty").grad = torch.empty(0, 3)
    _average(net.parameters())
    return Case(net)


def _large() -> Case:
    return Case(_backward(DistributedDataParallel(_net()), dist.get_rank(), scale=1e20))


LAYOUTS: dict[str, Callable[[], Case]] = {
    "DDP": _ddp,
    "DDP, parameters unused on some ranks": _unused,
    "FSDP 2": _fsdp,
    "FSDP 2, plain parameters beside": _fsdp_beside_plain,
    "HSDP": _hsdp,
    "tensor": _tensor,
    "sequence": _sequence,
    "2-D (FSDP 2 and tensor)": _two_dimensions,
    "experts of each rank": _experts,
    "tied over pipeline stages": _tied,
    "bfloat16 gradients": _bfloat16,
    "empty parameters": _empty,
    "gradients of 1e20": _large,
}
