"""Plugin ``fsdp``: parameters, gradients and optimizer state are sharded over ranks.

By torch's ``fully_shard`` (FSDP2; Zhao et al. 2023, arXiv 2304.11277): each parameter is a DTensor
sharded along its first dimension, and all-gathered for the forward and backward pass of its block.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn

from runner.booster.plugin.base import Misfit, ParallelModel, Plugin, require_process_group
from runner.booster.precision import dtype_of
from runner.clip import Layout
from runner.parallel.final_gradients import watch_blocks
from runner.parallel.gradient_sync import (
    broadcast_buffers,
    broadcast_model,
    in_turn,
    synchronise_batch_norm,
)
from runner.parallel.hooks import Usage, require_no_post_accumulate
from runner.parallel.mesh import grid
from runner.parallel.sharding import Sharding, reshard, shard_model, unsynchronised


class TorchFSDPPlugin(Plugin):
    """Fully sharded data parallelism.

    Args:
        reshard_after_forward: whether to reshard the parameters of a block after its forward pass
            and gather them again for its backward pass: less memory, more communication.
        dp_replicate: number of replicas; each is sharded over world size ÷ ``dp_replicate`` ranks.
        param_dtype: ``bf16`` or ``fp16``, the dtype in which parameters are gathered and computed;
            gradients are reduced in float32. None keeps the dtype of each parameter.
        cpu_offload: whether to keep parameters, gradients and optimizer state in host memory.
        sync_batchnorm: whether to compute batch norm over the samples of all data-parallel ranks
            (:class:`torch.nn.SyncBatchNorm`, only on GPUs).

    Raises:
        RuntimeError: there is no process group.
        ValueError: ``dp_replicate`` does not divide the world size.
    """

    def __init__(
        self,
        reshard_after_forward: bool = True,
        dp_replicate: int = 1,
        param_dtype: str | None = None,
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
    ) -> None:
        self.world = require_process_group("TorchFSDPPlugin")
        if self.world_size % dp_replicate:
            raise ValueError(f"{dp_replicate} replicas do not divide {self.world_size} ranks")
        self.sharding = Sharding(reshard_after_forward, dtype_of(param_dtype), cpu_offload)
        self.dp_replicate = dp_replicate
        self.sync_batchnorm = sync_batchnorm

    @classmethod
    def problems(cls, model: nn.Module, ranks: int, options: Mapping[str, Any]) -> list[Misfit]:
        """Return a problem if ``dp_replicate`` does not divide the world size."""
        replicas = options.get("dp_replicate", 1)
        if ranks % replicas:
            return [("dp_replicate", replicas, f"does not divide the {ranks} ranks (plugin.nproc)")]
        return []

    def configure(self, model: nn.Module) -> ParallelModel:
        """Shard each block (each element of a ModuleList), then the rest of the model."""
        if self.sync_batchnorm:
            synchronise_batch_norm(model, self.world)
        why = "fsdp computes with temporary copies of parameters"
        require_no_post_accumulate(model.named_parameters(), why)
        whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
        broadcast_model(model, self.world)
        device = next(model.parameters()).device.type
        axes = {"dp_replicate": self.dp_replicate} if self.dp_replicate > 1 else {}
        axes["dp_shard"] = self.world_size // self.dp_replicate
        usage = Usage()
        shard_model(model, grid(device, tuple(axes.values()), tuple(axes)), self.sharding, usage)
        return ParallelModel(
            model,
            Layout.of_sharded(model, self.world, whole),
            sync_grads=in_turn(
                partial(usage.drop_unused, dict(model.named_parameters()), self.world),
                broadcast_buffers(model, self.world),
            ),
            broadcast_params=partial(reshard, [model]),
            watch_final=partial(watch_blocks, model, usage, self.world),
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients stay unsharded and local."""
        return unsynchronised(model)


PLUGIN = TorchFSDPPlugin
