"""The arguments of Colossal-AI's ``GeminiPlugin``, and the plugin that does its work here."""

from __future__ import annotations

import logging
from typing import Any

from runner.booster.plugin.hybrid import HybridParallelPlugin

log = logging.getLogger(__name__)

WITHOUT_EFFECT = frozenset(
    {
        "chunk_config_dict",
        "chunk_init_device",
        "enable_all_optimization",
        "enable_async_reduce",
        "enable_flash_attention",
        "enable_fused_normalization",
        "enable_gradient_accumulation",
        "enable_jit_fused",
        "force_outputs_fp32",
        "gpu_margin_mem_ratio",
        "hidden_dim",
        "master_weights",
        "max_prefetch",
        "memstats",
        "min_chunk_size_m",
        "pin_memory",
        "search_range_m",
        "steady_cuda_cap_ratio",
        "strict_ddp_mode",
        "verbose",
        "warmup_non_model_data_ratio",
    }
)
"""Arguments about chunks of memory and kernels. Whatever they ask for, weights and outputs are
float32 here, and gradients accumulate under ``no_sync``."""


class GeminiPlugin(HybridParallelPlugin):
    """Sharded data parallelism, optionally with tensor parallelism, by ZeRO stage 2 or 3.

    Gemini moves chunks of parameters between devices. Here torch's ``fully_shard`` does that work:
    this is a :class:`~runner.booster.HybridParallelPlugin`, and the first rank logs with which
    arguments. Other arguments of Colossal-AI's plugin (``WITHOUT_EFFECT``) are accepted.

    Args:
        placement_policy: ``static`` or ``auto``; both keep what this rank holds where
            ``offload_optim_frac`` and ``offload_param_frac`` say.
        shard_param_frac: share of the parameters that is sharded. Above 0, all are (stage 3); at 0,
            gradients and optimizer state alone (stage 2).
        offload_optim_frac: share of the optimizer state in host memory. Above 0, all of it is, with
            the parameters and gradients.
        offload_param_frac: share of the parameters in host memory; as ``offload_optim_frac``.
        precision: ``fp16``, ``bf16`` or ``fp32``, for a Booster that is given none; by default full
            precision, where Colossal-AI's plugin has fp16.
        initial_scale: initial fp16 loss scale.
        max_norm: if above 0, each optimizer step clips the norm of the gradient to it.
        norm_type: always 2.
        tp_size: tensor-parallel size.
        enable_sequence_parallelism: shard activations along the sequence, with ``tp_size``.
        extra_dp_size: always 1.
        others: see above.

    Raises:
        RuntimeError: there is no process group.
        TypeError: an argument that Colossal-AI's plugin does not have.
        ValueError: a value that nothing here does; the message says what to use.
    """

    def __init__(
        self,
        placement_policy: str = "static",
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        precision: str | None = None,
        initial_scale: float | None = None,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_size: int = 1,
        enable_sequence_parallelism: bool = False,
        extra_dp_size: int = 1,
        **others: Any,
    ) -> None:
        unknown = sorted(others.keys() - WITHOUT_EFFECT)
        if unknown:
            raise TypeError(f"GeminiPlugin has no argument {', '.join(unknown)}")
        if placement_policy not in ("static", "auto"):
            raise ValueError(f"placement_policy is static or auto, not {placement_policy!r}")
        if norm_type != 2.0:
            raise ValueError(
                f"max_norm limits the norm of type 2, not {norm_type}: call "
                "optimizer.clip_grad_by_norm(max_norm, norm_type) instead"
            )
        if extra_dp_size != 1:
            raise ValueError(
                f"extra_dp_size={extra_dp_size}: for replicas of shards choose "
                f"TorchFSDPPlugin(dp_replicate={extra_dp_size})"
            )
        options: dict[str, Any] = {"zero_stage": 3 if shard_param_frac > 0 else 2}
        if offload_optim_frac > 0 or offload_param_frac > 0:
            options["cpu_offload"] = True
        if tp_size != 1:
            options |= {"tp_size": tp_size, "sequence_parallel": enable_sequence_parallelism}
        super().__init__(
            **options, precision=precision, initial_scale=initial_scale, max_norm=max_norm
        )
        if self.rank == 0:
            given = ", ".join(f"{name}={value}" for name, value in options.items())
            log.info("GeminiPlugin: HybridParallelPlugin(%s) does its work", given)
