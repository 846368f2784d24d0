"""Plugin ``ddp``: every rank holds the whole model, and gradients are averaged over ranks.

After the backward pass of the last microbatch all ranks hold bitwise equal gradients, so clipping
needs no collective. Both forward and backward pass have to run inside ``no_sync``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner.booster.plugin.base import ParallelModel, Plugin, require_process_group
from runner.clip import Layout
from runner.parallel.final_gradients import watch_buckets
from runner.parallel.gradient_sync import synchronise_batch_norm


class TorchDDPPlugin(Plugin):
    """Data parallelism by :class:`torch.nn.parallel.DistributedDataParallel`.

    The arguments are those of DDP, except ``sync_batchnorm``: whether to compute batch norm over
    the samples of all ranks (:class:`torch.nn.SyncBatchNorm`, only on GPUs).

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
        self.world = require_process_group("TorchDDPPlugin")
        self.sync_batchnorm = sync_batchnorm
        self.ddp_kwargs: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        if not broadcast_buffers:
            # Passed only if it differs, because newer versions of torch renamed it.
            self.ddp_kwargs["broadcast_buffers"] = False

    def configure(self, model: nn.Module) -> ParallelModel:
        """Wrap the model in DDP; every rank holds all gradients."""
        if self.sync_batchnorm:
            synchronise_batch_norm(model, self.world)
        device = next(model.parameters()).device
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, **self.ddp_kwargs)
        watch = partial(watch_buckets, wrapped)
        return ParallelModel(wrapped, Layout.of_model(model), watch_final=watch)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's context: gradients stay local until a backward pass outside.

        With ``static_graph`` the first backward pass of a training has to average its gradients:
        PyTorch 2.14 fails under ``DDP.no_sync`` there. The sum over the window is the same.
        """
        assert isinstance(model, DistributedDataParallel)
        if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
            return nullcontext()
        return model.no_sync()


PLUGIN = TorchDDPPlugin
