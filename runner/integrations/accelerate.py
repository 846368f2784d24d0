"""Clipping in a loop of Accelerate."""

from __future__ import annotations

from typing import Any

from torch import nn

from runner.clip import Decision
from runner.integrations.clipping import apply_gradient_clipping

_ELSEWHERE = {
    "DEEPSPEED": "DeepSpeed clips in its own step: set gradient_clipping of DeepSpeedPlugin",
    "MEGATRON_LM": "Megatron-LM clips in its own step: set gradient_clipping of MegatronLMPlugin",
    "XLA": "gradients of XLA are averaged over ranks by Accelerate's own clip_grad_norm_: use that",
}


def clip_gradients(
    accelerator: Any,
    model: nn.Module,
    clipping_type: str,
    clipping_threshold: float | None,
    norm_type: float = 2.0,
    *,
    optimizer: Any = None,
    **options: Any,
) -> Decision | None:
    """Unscale the gradients and clip them in place, instead of ``accelerator.clip_grad_norm_``.

    It clips by any mode, records what it did, and takes one norm over the whole model, also under
    ``fully_shard`` and tensor parallelism. Call it after ``accelerator.backward`` and before
    ``optimizer.step``. Inside of ``accelerator.accumulate`` it may be called for each microbatch:
    it does nothing until the last one of a step, where ``accelerator.sync_gradients`` is true.

    Args:
        accelerator: the ``Accelerator`` of the loop.
        model: what ``accelerator.prepare`` returned.
        clipping_type: a clipping mode, such as ``norm``, ``value`` or ``adaptive``.
        clipping_threshold: λ, above 0; None for ``chain`` and ``groups``.
        norm_type: p of the total norm.
        optimizer: with float16 and several optimizers, the one of this model. By default the
            gradients of all optimizers are unscaled, which is possible once a step.
        options: ``groups`` and options of the mode, see :func:`runner.apply_gradient_clipping`.

    Returns:
        What was done, which :meth:`runner.GradientMonitor.step` records; None before the last
        microbatch of a step.

    Raises:
        NotImplementedError: DeepSpeed, Megatron-LM or XLA, where Accelerate does not clip here.
        TypeError: FSDP 1: use ``FullyShardedDataParallelPlugin(fsdp_version=2)``.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in _ELSEWHERE:
        raise NotImplementedError(_ELSEWHERE[kind])
    if not accelerator.sync_gradients:
        return None
    accelerator.unscale_gradients(optimizer)
    return apply_gradient_clipping(model, clipping_type, clipping_threshold, norm_type, **options)
