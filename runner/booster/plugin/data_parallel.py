"""Plugins ``ddp`` and ``fsdp``: each rank trains on its part of the samples.

Under ``ddp`` every rank holds the whole model. After the backward pass of the last microbatch all
ranks hold bitwise equal gradients, so clipping needs no collective. Under ``fsdp`` (FSDP2; Zhao et
al. 2023, arXiv 2304.11277) each parameter is a DTensor sharded along its first dimension, and
all-gathered for the forward and backward pass of its block.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.booster.plugin import base
from runner.clip import Layout
from runner.parallel import gradient_sync as sync
from runner.parallel.hooks import Usage, held_tensors, require_no_post_accumulate, watch_blocks
from runner.parallel.mesh import grid
from runner.parallel.sharding import Sharding, reshard, shard_model, unsynchronised


class TorchDDPPlugin(base.Plugin):
    """Data parallelism by :class:`torch.nn.parallel.DistributedDataParallel`.

    The arguments are those of DDP, except ``sync_batchnorm``: whether to compute batch norm over
    the samples of all ranks (:class:`torch.nn.SyncBatchNorm`, only on GPUs). ``static_graph`` means
    ``find_unused_parameters``, because PyTorch 2.14 fails under ``no_sync`` of a static graph. Both
    forward and backward pass have to run inside ``no_sync``.

    Raises:
        RuntimeError: there is no process group.
    """

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        sync_batchnorm: bool = False,
    ) -> None:
        self.world = base.require_process_group("TorchDDPPlugin")
        self.sync_batchnorm = sync_batchnorm
        self.ddp_kwargs: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters or static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        if not broadcast_buffers:
            # Passed only if it differs, because newer versions of torch renamed it.
            self.ddp_kwargs["broadcast_buffers"] = False

    def configure(self, model: nn.Module) -> base.ParallelModel:
        """Wrap the model in DDP; every rank holds all gradients."""
        if self.sync_batchnorm:
            sync.synchronise_batch_norm(model, self.world)
        device = next(model.parameters()).device
        ids = [device.index] if device.type == "cuda" else None
        wrapped = Replica(model, device_ids=ids, **self.ddp_kwargs)
        return base.ParallelModel(wrapped, Layout.of_model(model), sync_grads=wrapped.average_again)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's context: gradients stay local until a backward pass outside."""
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()


class Replica(DistributedDataParallel):
    """DDP for parameters that are frozen and unfrozen, and for several backward passes of a graph.

    DDP itself averages the gradients of the parameters that were trained when it was built, in the
    first backward pass after a forward pass.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._options = options
        self._note_trained()
        self._averages = False  # whether DDP averages in the next backward pass
        self._missed = False  # whether a backward pass has run in which it did not
        self._pass = -1

    def _note_trained(self) -> None:
        self._held_parameters = list(self.module.parameters())
        self._trained = [p.requires_grad for p in self._held_parameters]
        with torch.enable_grad():
            views = [p.view_as(p).grad_fn for p in self._held_parameters if p.requires_grad]
        self._accumulators = [view.next_functions[0][0] for view in views if view is not None]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; register parameters that were frozen or unfrozen since the last pass."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        trained = [p.requires_grad for p in self._held_parameters]
        held = not self.require_backward_grad_sync
        if trained != self._trained and any(trained):
            # Ranks hold the same weights, but each of them its own buffers.
            mode, hooks = self.training, self._comm_hooks
            DistributedDataParallel.__init__(self, self.module, init_sync=False, **self._options)
            self.training, self.require_backward_grad_sync = mode, not held
            for hook, state in hooks:
                self.register_comm_hook(state, hook)
            self._note_trained()
        outputs = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._averages = self._averages or not held
        for output in held_tensors(outputs):
            if output.requires_grad and not output.is_leaf:
                output.register_hook(partial(self._note_pass, held))  # type: ignore[no-untyped-call]
        return outputs

    def _note_pass(self, held: bool, gradient: Tensor) -> None:
        """Note that a backward pass runs; each pass has a number."""
        number = torch._C._current_graph_task_id()
        executes = torch._C._will_engine_execute_node
        # A pass of torch.autograd.grad may accumulate no gradient.
        if number == self._pass or not any(map(executes, self._accumulators)):
            return
        self._pass = number
        self._missed = self._missed or not (self._averages or held)
        self._averages = False

    def average_again(self) -> None:
        """Average gradients over ranks, if a backward pass has run in which DDP did not.

        Those that are averaged already are equal on all ranks, and stay as they are.
        """
        if self._missed:
            self._missed = False
            group: Any = self.process_group
            sync.average(sync.Replicas(self._held_parameters, group, group.size()))


class TorchFSDPPlugin(base.Plugin):
    """Fully sharded data parallelism by torch's ``fully_shard``.

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
        self.world = base.require_process_group("TorchFSDPPlugin")
        if self.world_size % dp_replicate:
            raise ValueError(f"{dp_replicate} replicas do not divide {self.world_size} ranks")
        self.sharding = Sharding(reshard_after_forward, base.dtype_of(param_dtype), cpu_offload)
        self.dp_replicate = dp_replicate
        self.sync_batchnorm = sync_batchnorm

    @classmethod
    def problems(
        cls, model: nn.Module, ranks: int, options: Mapping[str, Any]
    ) -> list[base.Misfit]:
        """Return a problem if ``dp_replicate`` does not divide the world size."""
        replicas = options.get("dp_replicate", 1)
        if ranks % replicas:
            return [("dp_replicate", replicas, f"does not divide the {ranks} ranks (plugin.nproc)")]
        return []

    def configure(self, model: nn.Module) -> base.ParallelModel:
        """Shard each block (each element of a ModuleList), then the rest of the model."""
        if self.sync_batchnorm:
            sync.synchronise_batch_norm(model, self.world)
        why = "fsdp computes with temporary copies of parameters"
        require_no_post_accumulate(model.named_parameters(), why)
        whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
        sync.broadcast_model(model, self.world)
        device = next(model.parameters()).device.type
        axes = {"dp_replicate": self.dp_replicate} if self.dp_replicate > 1 else {}
        axes["dp_shard"] = self.world_size // self.dp_replicate
        usage = Usage()
        shard_model(model, grid(device, tuple(axes.values()), tuple(axes)), self.sharding, usage)
        return base.ParallelModel(
            model,
            Layout.of_sharded(model, self.world, whole),
            sync_grads=sync.in_turn(
                partial(usage.drop_unused, dict(model.named_parameters()), self.world),
                sync.broadcast_buffers(model, self.world),
            ),
            broadcast_params=partial(reshard, [model]),
            watch_final=partial(watch_blocks, model, usage, self.world),
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients stay unsharded and local."""
        return unsynchronised(model)
