"""Optimizer steps by torch's own tools, as its documentation shows them: what table step compares.

Each function makes what takes one step and returns the norm of the gradient before clipping. It
keeps, splits or wraps ``model`` on this rank, which all ranks have made alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from runner.models.gpt import GPT
from runner.models.mixture import Mixture

Step = Callable[[], Tensor]
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
NewOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MICROBATCHES = 4  # of a batch in a pipeline
MESH = "cpu"


def data_parallel(
    model: nn.Module, batch: Batch, loss: Loss, new_optimizer: NewOptimizer, threshold: float
) -> Step:
    """Make steps of ``DistributedDataParallel``."""
    replica = DistributedDataParallel(model)
    optimizer = new_optimizer(replica.parameters())
    return _clipped_by_torch(replica, batch, loss, optimizer, threshold)


def redundant(
    model: nn.Module, batch: Batch, loss: Loss, new_optimizer: NewOptimizer, threshold: float
) -> Step:
    """Make steps of ``DistributedDataParallel`` and ``ZeroRedundancyOptimizer``."""
    replica = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), new_optimizer)  # type: ignore[arg-type]
    return _clipped_by_torch(replica, batch, loss, optimizer, threshold)


def sharded(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    new_optimizer: NewOptimizer,
    threshold: float,
    reshard_after_forward: bool = True,
) -> Step:
    """Make steps of ``fully_shard``, of each block and of the rest of the model."""
    mesh = init_device_mesh(MESH, (dist.get_world_size(),))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in chain.from_iterable(lists):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    optimizer = new_optimizer(model.parameters())
    return _clipped_by_torch(model, batch, loss, optimizer, threshold)


def _clipped_by_torch(
    model: nn.Module, batch: Batch, loss: Loss, optimizer: Optimizer, threshold: float
) -> Step:
    parameters = list(model.parameters())

    def clip() -> Tensor:
        return clip_grad_norm_(parameters, threshold, foreach=True)

    return _step(_backward(model, batch, loss), clip, [optimizer])


def _backward(model: nn.Module, batch: Batch, loss: Loss) -> Callable[[], object]:
    """Return what runs the forward and the backward pass of a batch."""
    inputs, targets = batch

    def backward() -> None:
        loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]

    return backward


def _step(
    backward: Callable[[], object], clip: Callable[[], Tensor], optimizers: Sequence[Optimizer]
) -> Step:
    """Return one step; ``clip`` returns the norm before."""

    def step() -> Tensor:
        backward()
        norm = clip()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return norm

    return step


def tensor_parallel(
    model: nn.Module, batch: Batch, loss: Loss, new_optimizer: NewOptimizer, threshold: float
) -> Step:
    """Make steps of ``parallelize_module``, with the plan of :class:`GPT`.

    ``clip_grad_norm_`` refuses DTensors beside plain tensors: each kind has a norm of its own.
    """
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh(MESH, (dist.get_world_size(),)), plan)
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    # Fused AdamW steps either kind, not both at once.
    optimizers = [new_optimizer(split), new_optimizer(whole)]

    def clip() -> Tensor:
        of_split = get_total_norm(_gradients(split), foreach=True)
        of_whole = get_total_norm(_gradients(whole), foreach=True)
        assert isinstance(of_split, DTensor)
        norm = torch.hypot(of_split.full_tensor(), of_whole)
        clip_grads_with_norm_(split, threshold, norm, foreach=True)
        clip_grads_with_norm_(whole, threshold, norm, foreach=True)
        return norm

    return _step(_backward(model, batch, loss), clip, optimizers)


class _Enter(nn.Module):
    """What a :class:`GPT` does before its blocks."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.embed = model.embed
        self.positions = model.positions

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        positions: Tensor = self.positions(torch.arange(tokens.shape[1]))
        return hidden + positions


def pipelined(
    model: nn.Module, batch: Batch, loss: Loss, new_optimizer: NewOptimizer, threshold: float
) -> Step:
    """Make steps of ``Schedule1F1B``, with half of the blocks on each of two ranks."""
    from torch.distributed import pipelining

    assert isinstance(model, GPT)
    blocks = list(model.blocks)
    half = len(blocks) // 2
    is_last = dist.get_rank() == 1
    kept: list[nn.Module] = [_Enter(model), *blocks[:half]]
    if is_last:
        kept = [*blocks[half:], model.norm, model.head]
    module = nn.Sequential(*kept)
    parameters = list(module.parameters())
    optimizer = new_optimizer(parameters)
    inputs, targets = batch
    stage = pipelining.PipelineStage(module, dist.get_rank(), 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)

    def backward() -> None:
        if is_last:
            schedule.step(target=targets, losses=[])
        else:
            schedule.step(inputs)

    def clip() -> Tensor:
        norm = _norm_of_parts(_gradients(parameters))
        clip_grads_with_norm_(parameters, threshold, norm, foreach=True)
        return norm

    return _step(backward, clip, [optimizer])


def spread_experts(
    model: nn.Module, batch: Batch, loss: Loss, new_optimizer: NewOptimizer, threshold: float
) -> Step:
    """Make steps with experts on different ranks, by ``all_to_all_single`` and one all-reduce.

    torch has no tool for it: the gradients of all but the experts are averaged in a flat buffer
    after the backward pass.
    """
    world = dist.group.WORLD
    assert world is not None
    experts: list[nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, Mixture):
            module.spread(world)
            experts += module.experts.parameters()
    ids = {id(parameter) for parameter in experts}
    shared = [p for p in model.parameters() if id(p) not in ids]
    parameters = [*shared, *experts]
    optimizer = new_optimizer(parameters)
    ranks = dist.get_world_size()

    def clip() -> Tensor:
        gradients = _gradients(shared)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= ranks
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        of_experts = _gradients(experts)
        for gradient in of_experts:
            gradient /= ranks
        norm = torch.hypot(get_total_norm(gradients, foreach=True), _norm_of_parts(of_experts))
        clip_grads_with_norm_(parameters, threshold, norm, foreach=True)
        return norm

    return _step(_backward(model, batch, loss), clip, [optimizer])


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _norm_of_parts(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of gradients of which each rank holds some."""
    square = get_total_norm(gradients, foreach=True).square()
    dist.all_reduce(square)
    return square.sqrt()
