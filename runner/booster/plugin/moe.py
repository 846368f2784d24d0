"""Plugin ``moe``: experts are on different data-parallel ranks, other weights are replicated."""

from __future__ import annotations

from typing import Any

from runner.booster.plugin.hybrid import HybridParallelPlugin


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """Expert parallelism, and data parallelism for all other weights.

    Arguments and errors are those of :class:`~runner.booster.HybridParallelPlugin`. By default all
    data-parallel ranks share one set of experts.
    """

    def __init__(
        self,
        ep_size: int | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        dp_size: int | None = None,
        zero_stage: int = 0,
        sync_batchnorm: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            tp_size=tp_size,
            pp_size=pp_size,
            dp_size=dp_size,
            ep_size=ep_size,
            zero_stage=zero_stage,
            sync_batchnorm=sync_batchnorm,
            **kwargs,
        )


PLUGIN = MoeHybridParallelPlugin
