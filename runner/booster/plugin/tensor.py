"""Plugin ``tensor``: single weights are split over ranks, by a plan of module patterns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from runner.booster.plugin.base import require_process_group
from runner.booster.plugin.hybrid import HybridParallelPlugin


class TensorParallelPlugin(HybridParallelPlugin):
    """Tensor parallelism, and data parallelism over what is left of the ranks.

    Args:
        tp_size: parts of each split weight; by default all ranks.
        dp_size: data parts; by default what is left of the ranks.
        sequence_parallel: split activations between split layers along the sequence.
        tp_plan: patterns of module names and styles; by default the model's own.
        sync_batchnorm: see :class:`~runner.booster.TorchFSDPPlugin`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the sizes do not multiply to the ranks.
    """

    def __init__(
        self,
        tp_size: int | None = None,
        dp_size: int | None = None,
        sequence_parallel: bool = False,
        tp_plan: Mapping[str, str] | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        require_process_group("TensorParallelPlugin")
        super().__init__(
            tp_size=tp_size or max(1, dist.get_world_size() // (dp_size or 1)),
            dp_size=dp_size,
            sequence_parallel=sequence_parallel,
            tp_plan=tp_plan,
            sync_batchnorm=sync_batchnorm,
        )

    @classmethod
    def sizes_given(cls, options: Mapping[str, Any], ranks: int) -> dict[str, Any]:
        """As in the constructor."""
        dp = options.get("dp_size")
        return {"dp": dp, "tp": options.get("tp_size") or max(1, ranks // (dp or 1))}


PLUGIN = TensorParallelPlugin
