"""Sharding over data-parallel ranks by torch's ``fully_shard`` (FSDP2)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from runner.parallel.experts import mixtures
from runner.parallel.hooks import gradient_hooks
from runner.parallel.usage import Usage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sharding:
    """How parameters are gathered and given back.

    Attributes:
        reshard_after_forward: give the gathered parameters of a block back after its forward pass
            and gather them again for its backward pass; less memory, more traffic.
        param_dtype: dtype in which parameters are gathered and computed, while gradients are
            reduced in float32. None keeps the dtype of each parameter.
        cpu_offload: keep parameters, gradients and optimizer state in host memory between uses.
    """

    reshard_after_forward: bool = True
    param_dtype: torch.dtype | None = None
    cpu_offload: bool = False

    def options(self) -> dict[str, Any]:
        """Arguments of ``fully_shard``."""
        policy = MixedPrecisionPolicy()
        if self.param_dtype is not None:
            policy = MixedPrecisionPolicy(self.param_dtype, reduce_dtype=torch.float32)
        offload: OffloadPolicy = OffloadPolicy()
        if self.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        return {
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": policy,
            "offload_policy": offload,
        }


def shard_model(
    root: nn.Module,
    mesh: DeviceMesh,
    sharding: Sharding,
    usage: Usage,
    experts: DeviceMesh | None = None,
    ends: bool = True,
) -> None:
    """Shard each block (each element of a ModuleList, but experts), then the rest of ``root``.

    Args:
        root: the model, or what this rank has of it.
        mesh: the data-parallel ranks; two axes replicate over the first and shard over the second.
        sharding: how.
        usage: records which parameters get a gradient, and runs the user's hooks on it.
        experts: the ranks that hold the same experts, where experts are spread over ranks. Their
            gradients are averaged over these ranks alone.
        ends: whether what comes out of ``root`` is what comes out of the model.
    """
    _make_contiguous(root)
    options = sharding.options()
    hooks = {
        (module, key): found
        for module in root.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and (found := gradient_hooks(parameter)) is not None
    }
    for _, mixture in mixtures(root) if experts is not None else ():
        for expert in mixture.get_submodule("experts").children():
            if any(True for _ in expert.parameters()):
                fully_shard(expert, mesh=experts, **options)
    # Experts belong to their block: a rank may run some of them and not others.
    lists = [
        module
        for name, module in root.named_modules()
        if isinstance(module, nn.ModuleList) and "experts" not in name.split(".")
    ]
    # From the inside out: a block takes what its own blocks have left.
    for blocks in reversed(lists):
        for block in blocks:
            if not isinstance(block, FSDPModule):
                fully_shard(block, mesh=mesh, **options)
    if ends and sharding.param_dtype is not None:
        # A loss is not taken in half precision.
        policy = options["mp_policy"]
        options["mp_policy"] = dataclasses.replace(policy, output_dtype=torch.float32)
    fully_shard(root, mesh=mesh, **options)
    # Ranks whose samples took different ways through the model would else add up gradients of
    # different parameters, and nobody would notice. What no rank used gets its None back from
    # `usage`.
    assert isinstance(root, FSDPModule)
    root.set_reduce_scatter_unused_params(True)
    usage.watch(root, hooks)


def _make_contiguous(root: nn.Module) -> None:
    """Give channels-last weights the memory format that ``fully_shard`` asks for."""
    changed = [name for name, p in root.named_parameters() if not p.is_contiguous()]
    for name in changed:
        parameter = root.get_parameter(name)
        parameter.data = parameter.data.contiguous()
    if changed and (not dist.is_initialized() or dist.get_rank() == 0):
        log.warning(
            "made contiguous, because fully_shard keeps no other memory format (channels_last): %s",
            ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else ""),
        )


def reshard(roots: Iterable[nn.Module]) -> None:
    """Give the gathered parameters of ``roots`` back. After a step they are those from before it.

    A backward pass does it, but a forward pass without one, between backward pass and step, may
    have gathered them again.
    """
    for root in roots:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@contextmanager
def unsynchronised(model: nn.Module) -> Iterator[None]:
    """Gradients of a sharded ``model`` stay whole and local inside."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
