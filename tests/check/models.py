"""Small models with gradients, spread over ranks in the ways that people do it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def scripts(module):
    """The functions of a module that take no argument, by name: each is one script."""
    bodies = {}
    for name, body in module.items():
        is_own = getattr(body, "__module__", "") == module["__name__"]
        if is_own and not name.startswith("_") and body.__code__.co_argcount == 0:
            bodies[name] = body
    return bodies


def net(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    return nn.Sequential(*layers).to(dtype)


def backward(model, seed=0, scale=1.0):
    """Gradients of this rank's own samples."""
    generator = torch.Generator().manual_seed(seed + 10 * dist.get_rank())
    first = next(model.parameters())
    inputs = torch.randn(5, 6, generator=generator).to(first.dtype)
    (scale * model(inputs).square().sum()).backward()
    return model


def ddp(**options):
    return backward(DistributedDataParallel(net(), **options))


def fsdp(dtype=torch.float32):
    model = net(dtype)
    fully_shard(model[2])
    return backward(fully_shard(model))


def average(tensors, group=None):
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor.div_(dist.get_world_size(group))


def fsdp_beside_plain():
    """Norms stay whole on each rank, and their gradients are averaged by hand."""
    model = net()
    ignored = set(model[1].parameters())
    fully_shard(model[2], ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    backward(model)
    average(parameter.grad for parameter in ignored)
    return model


def mesh_of(*sizes, names=("replicas", "shards")):
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def hsdp():
    return backward(fully_shard(net(), mesh=mesh_of(dist.get_world_size() // 2, 2)))


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


class Split(nn.Sequential):
    """Two layers that tensor parallelism splits, and a plain head."""


def tensor_net():
    torch.manual_seed(0)
    return Split(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def tensor_parallel():
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    model = parallelize_module(tensor_net(), mesh, PLAN)
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    model(inputs).square().sum().backward()
    return model


def two_dimensions():
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    model = parallelize_module(tensor_net(), mesh["tensor"], PLAN)
    fully_shard(model, mesh=mesh["data"])
    generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))
    model(torch.randn(5, 6, generator=generator)).square().sum().backward()
    return model


class Mixture(nn.Module):
    """A gate that all ranks share, and an expert of this rank."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(6, 6)
        torch.manual_seed(100 + number)
        self.experts = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, inputs):
        return self.experts(self.gate(inputs))


def experts(size=2):
    """A model, and the group of ranks that hold different experts."""
    mesh = mesh_of(dist.get_world_size() // size, size, names=("replicas", "experts"))
    number = mesh.get_local_rank("experts")
    model = backward(Mixture(number), seed=1)
    for parameter in model.experts.parameters():
        parameter.grad.mul_(1 + 2 * number)
    average(parameter.grad for parameter in model.gate.parameters())
    average((p.grad for p in model.experts.parameters()), mesh.get_group("replicas"))
    return model, mesh


def stages():
    """Two stages of a pipeline: an embedding and the head that is tied to it."""
    stage = dist.get_rank() % 2
    torch.manual_seed(0)
    shared = torch.randn(10, 6)
    if stage == 0:
        model = nn.ModuleDict({"embed": nn.Embedding(10, 6), "first": nn.Linear(6, 6)})
        weight = model["embed"].weight
    else:
        model = nn.ModuleDict({"second": nn.Linear(6, 6), "head": nn.Linear(6, 10, bias=False)})
        weight = model["head"].weight
    weight.detach().copy_(shared)
    generator = torch.Generator().manual_seed(stage)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    weight.grad = torch.randn(10, 6, generator=torch.Generator().manual_seed(9))
    return model


def cut_by_hand():
    """A matrix of which every rank has rows, as a plain tensor, beside a shared vector."""
    model = nn.Module()
    torch.manual_seed(dist.get_rank())
    model.rows = nn.Parameter(torch.randn(3, 6))
    model.rows.grad = torch.randn(3, 6)
    torch.manual_seed(0)
    model.norm = nn.Parameter(torch.ones(6))
    model.norm.grad = torch.randn(6)
    return model


def squares(parameters):
    parts = [p.grad for p in parameters if p.grad is not None]
    parts = [getattr(part, "_local_tensor", part).double() for part in parts]
    return torch.stack([part.square().sum() for part in parts]).sum().float()


def summed(value, group=None):
    value = value.clone()
    dist.all_reduce(value, group=group)
    return value


def scale(parameters, norm, limit):
    coefficient = min(1.0, limit / (float(norm) + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            getattr(parameter.grad, "_local_tensor", parameter.grad).mul_(coefficient)
    return norm
