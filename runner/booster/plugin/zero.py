"""Plugin ``zero``: optimizer state, then gradients, then parameters are partitioned over ranks.

Rajbhandari et al. 2020 (arXiv 1910.02054). With stage 1 each rank steps some of the parameters.
Stages 2 and 3 shard every parameter by torch's ``fully_shard``; stage 2 keeps it unsharded between
forward and backward pass, stage 3 reshards it.
"""

from __future__ import annotations

from typing import Any

from runner.booster.plugin.hybrid import HybridParallelPlugin


class LowLevelZeroPlugin(HybridParallelPlugin):
    """Data parallelism whose optimizer state, gradients or parameters are partitioned over ranks.

    Args:
        stage: ZeRO stage 1, 2 or 3; Colossal-AI's name of ``zero_stage``.
        zero_stage: the same; it overrides ``stage``.

    The other arguments, also ``precision``, ``initial_scale`` and ``max_norm``, and the errors are
    those of :class:`~runner.booster.HybridParallelPlugin`. The stage cannot be 0.
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


PLUGIN = LowLevelZeroPlugin
