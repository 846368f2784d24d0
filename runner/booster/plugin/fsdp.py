"""Plugin ``fsdp``: parameters, gradients and optimizer state are sharded over ranks.

By torch's ``fully_shard`` (FSDP2; Zhao et al. 2023, arXiv 2304.11277): each parameter is a DTensor
split along its first dimension, gathered for a block's forward and backward pass. A rank holds a
shard of every gradient, so a norm is a sum over ranks, and a vector is a unit cut by shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from runner.booster.plugin.base import Plugin, require_process_group
from runner.clip import Layout


class TorchFSDPPlugin(Plugin):
    """Fully sharded data parallelism.

    Args:
        reshard_after_forward: give the gathered parameters of a block back after its forward pass
            and gather them again for its backward pass; less memory, more traffic.
        dp_replicate: number of replicas; each is sharded over world size ÷ ``dp_replicate`` ranks.

    Raises:
        RuntimeError: there is no process group.
        ValueError: ``dp_replicate`` does not divide the ranks.
    """

    def __init__(self, reshard_after_forward: bool = True, dp_replicate: int = 1) -> None:
        require_process_group("TorchFSDPPlugin")
        if self.world_size % dp_replicate:
            raise ValueError(f"{dp_replicate} replicas do not divide {self.world_size} ranks")
        self.reshard_after_forward = reshard_after_forward
        self.dp_replicate = dp_replicate

    def configure(self, model: nn.Module) -> tuple[nn.Module, Layout]:
        """Shard each block (each element of a ModuleList), then the rest of the model."""
        device = next(model.parameters()).device.type
        shape: tuple[int, ...] = (self.world_size,)
        names: tuple[str, ...] = ("dp_shard",)
        if self.dp_replicate > 1:
            shape = (self.dp_replicate, self.world_size // self.dp_replicate)
            names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        for module in model.modules():
            for block in module if isinstance(module, nn.ModuleList) else ():
                fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        fully_shard(model, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        assert dist.group.WORLD is not None
        return model, Layout.of_sharded(model, dist.group.WORLD)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Gradients stay whole and local until a backward pass outside."""
        return _held(model)


@contextmanager
def _held(model: nn.Module) -> Iterator[None]:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


PLUGIN = TorchFSDPPlugin
