"""Plugin ``zero``: optimizer state, then gradients, then parameters are partitioned over ranks.

Rajbhandari et al. 2020 (arXiv 1910.02054). Stage 1 deals whole parameters out to be stepped; stages
2 and 3 shard every parameter by torch's ``fully_shard``, and keep it gathered between forward and
backward pass or give it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from runner.booster.plugin.hybrid import HybridParallelPlugin


class LowLevelZeroPlugin(HybridParallelPlugin):
    """Data parallelism without redundancy.

    Args:
        stage: 1, 2 or 3; Colossal-AI's name of ``zero_stage``.
        zero_stage: the same.
        reshard_after_forward: with stage 3, give gathered parameters back after the forward pass.
        param_dtype: with stages 2 and 3, see :class:`~runner.booster.TorchFSDPPlugin`.
        cpu_offload: with stages 2 and 3, likewise.
        sync_batchnorm: see :class:`~runner.booster.TorchFSDPPlugin`.
        kwargs: ``precision``, ``initial_scale`` and ``max_norm`` of
            :class:`~runner.booster.HybridParallelPlugin`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: a stage other than 1, 2 and 3.
    """

    def __init__(
        self,
        stage: int = 1,
        zero_stage: int | None = None,
        reshard_after_forward: bool = True,
        param_dtype: str | None = None,
        cpu_offload: bool = False,
        sync_batchnorm: bool = False,
        **kwargs: Any,
    ) -> None:
        chosen = stage if zero_stage is None else zero_stage
        if chosen not in (1, 2, 3):
            raise ValueError(f"zero_stage is 1, 2 or 3, not {chosen}")
        super().__init__(
            zero_stage=chosen,
            reshard_after_forward=reshard_after_forward,
            param_dtype=param_dtype,
            cpu_offload=cpu_offload,
            sync_batchnorm=sync_batchnorm,
            **kwargs,
        )

    @classmethod
    def problems(
        cls, model: nn.Module, ranks: int, options: Mapping[str, Any]
    ) -> list[tuple[str, Any, str]]:
        """None: any model on any number of ranks."""
        return []


PLUGIN = LowLevelZeroPlugin
