"""Plugin ``moe``: experts are on different data-parallel ranks, other weights are replicated."""

from __future__ import annotations

from typing import Any

from runner.booster.plugin.hybrid import HybridParallelPlugin


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """Expert parallelism, with the other arguments of :class:`HybridParallelPlugin`.

    Args:
        ep_size: number of data-parallel ranks that share one set of experts; by default all.
        tp_size: tensor-parallel size.
        pp_size: pipeline-parallel size.
        dp_size: data-parallel size; by default the ranks that the other sizes leave.
        zero_stage: see :class:`HybridParallelPlugin`.
        sync_batchnorm: see :class:`~runner.booster.TorchFSDPPlugin`.
        kwargs: further arguments of :class:`HybridParallelPlugin`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the sizes do not multiply to the number of ranks.
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
