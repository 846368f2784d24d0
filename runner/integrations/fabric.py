"""Clipping in a loop of Lightning Fabric."""

from __future__ import annotations

from typing import Any

from torch import nn

from runner.clip import Decision
from runner.integrations.clipping import apply_gradient_clipping

_CLIPS_ITSELF = "DeepSpeedStrategy"


def clip_gradients(
    fabric: Any,
    module: nn.Module,
    optimizer: Any,
    clipping_type: str,
    clipping_threshold: float | None,
    norm_type: float = 2.0,
    **options: Any,
) -> Decision:
    """Unscale the gradients and clip them in place, instead of ``fabric.clip_gradients``.

    It clips by any mode, records what it did, and takes one norm over the whole model, also where
    ``ModelParallelStrategy`` has spread it over ranks. Call it once a step, after the last
    ``fabric.backward`` and before ``optimizer.step``.

    Args:
        fabric: the ``Fabric`` of the loop.
        module: what ``fabric.setup`` returned.
        optimizer: the optimizer that ``fabric.setup`` returned, whose gradients are unscaled.
        clipping_type: a clipping mode, such as ``norm``, ``value`` or ``adaptive``.
        clipping_threshold: λ, above 0; None for ``chain`` and ``groups``.
        norm_type: p of the total norm.
        options: ``groups`` and options of the mode, see :func:`runner.apply_gradient_clipping`.

    Returns:
        What was done. :meth:`runner.GradientMonitor.step` records it.

    Raises:
        NotImplementedError: under ``DeepSpeedStrategy``, whose engine clips; with a fused optimizer
            and float16, which unscales inside its step (Fabric refuses it).
        TypeError: under ``FSDPStrategy`` (FSDP 1): use ``ModelParallelStrategy``.
    """
    strategy = fabric.strategy
    if any(kind.__name__ == _CLIPS_ITSELF for kind in type(strategy).__mro__):
        raise NotImplementedError(
            "DeepSpeed clips in its own step: set gradient_clipping of DeepSpeedStrategy"
        )
    inner = getattr(optimizer, "optimizer", optimizer)
    strategy.precision.unscale_gradients(inner)
    return apply_gradient_clipping(module, clipping_type, clipping_threshold, norm_type, **options)
