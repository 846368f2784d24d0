"""Plugin ``pipeline``: runs of layers on different ranks, microbatches flowing through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from runner.booster.plugin.base import require_process_group
from runner.booster.plugin.hybrid import HybridParallelPlugin


class PipelineParallelPlugin(HybridParallelPlugin):
    """Pipeline parallelism, and data parallelism over what is left of the ranks.

    Args:
        pp_size: ranks that stages are dealt to; by default all ranks.
        dp_size: data parts; by default what is left of the ranks.
        schedule: ``gpipe``, ``1f1b``, ``interleaved_1f1b`` or ``zero_bubble``; the last two
            have two stages a rank.
        num_microbatches: parts that a batch is split into; by default as many as stages.
        split: names of the modules with which further stages begin; by default stages have about as
            many parameters each.
        sync_batchnorm: see :class:`~runner.booster.TorchFSDPPlugin`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the sizes do not multiply to the ranks.
    """

    def __init__(
        self,
        pp_size: int | None = None,
        dp_size: int | None = None,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        split: Sequence[str] | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        require_process_group("PipelineParallelPlugin")
        super().__init__(
            pp_size=pp_size or max(1, dist.get_world_size() // (dp_size or 1)),
            dp_size=dp_size,
            schedule=schedule,
            num_microbatches=num_microbatches,
            split=split,
            sync_batchnorm=sync_batchnorm,
        )

    @classmethod
    def sizes_given(cls, options: Mapping[str, Any], ranks: int) -> dict[str, Any]:
        """As in the constructor."""
        dp = options.get("dp_size")
        return {"dp": dp, "pp": options.get("pp_size") or max(1, ranks // (dp or 1))}


PLUGIN = PipelineParallelPlugin
