"""Plugin ``ddp``: every rank holds the whole model, gradients are averaged over ranks.

After the last microbatch's backward pass all ranks hold the same gradients to the bit, so clipping
needs no further collective. ``no_sync`` has to hold forward and backward alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner.booster.plugin.base import Plugin
from runner.clip import Layout


class TorchDDPPlugin(Plugin):
    """Data parallelism by :class:`torch.nn.parallel.DistributedDataParallel`.

    The arguments are DDP's own. The process group must exist (:func:`runner.launch_from_torch`).
    """

    def __init__(
        self,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "TorchDDPPlugin needs a process group: call runner.launch_from_torch() first, "
                "and start the script by torchrun"
            )
        self.ddp_kwargs: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        if not broadcast_buffers:
            # Given only where it differs: newer versions of torch call it by another name.
            self.ddp_kwargs["broadcast_buffers"] = False

    def configure(self, model: nn.Module) -> tuple[nn.Module, Layout]:
        """DDP over the model, and a layout that is whole on every rank."""
        device = next(model.parameters()).device
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, **self.ddp_kwargs)
        return wrapped, Layout.of_model(model)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """DDP's own: gradients stay local until a backward pass outside."""
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()

    def sum_over_data(self, figures: Sequence[float]) -> list[float]:
        """One reduction of host memory (gloo), so that no accelerator is waited for."""
        buffer = torch.tensor(figures, dtype=torch.float64)
        dist.all_reduce(buffer)
        return buffer.tolist()


PLUGIN = TorchDDPPlugin
