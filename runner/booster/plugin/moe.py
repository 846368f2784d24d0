"""Plugin ``moe``: experts are spread over data-parallel ranks, everything else is repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from runner.booster.plugin.base import require_process_group
from runner.booster.plugin.hybrid import HybridParallelPlugin


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """Expert parallelism, with whatever else :class:`HybridParallelPlugin` has.

    Args:
        ep_size: data parts that share one set of experts; by default all of them.
        tp_size: parts of each split weight.
        pp_size: ranks that pipeline stages are dealt to.
        dp_size: data parts; by default what is left of the ranks.
        zero_stage: see :class:`HybridParallelPlugin`.
        sync_batchnorm: likewise.
        kwargs: further arguments of :class:`HybridParallelPlugin`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: the sizes do not multiply to the ranks.
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
        require_process_group("MoeHybridParallelPlugin")
        parts = dp_size or max(1, dist.get_world_size() // (tp_size * pp_size))
        super().__init__(
            tp_size=tp_size,
            pp_size=pp_size,
            dp_size=parts,
            ep_size=ep_size or parts,
            zero_stage=zero_stage,
            sync_batchnorm=sync_batchnorm,
            **kwargs,
        )

    @classmethod
    def sizes_given(cls, options: Mapping[str, Any], ranks: int) -> dict[str, Any]:
        """As in the constructor."""
        given = super().sizes_given(options, ranks)
        given["ep"] = options.get("ep_size") or given["dp"] or ranks // (given["tp"] * given["pp"])
        return given


PLUGIN = MoeHybridParallelPlugin
