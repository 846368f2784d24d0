"""What torch's fused optimizers need: matching strides, and a flag on the device to skip a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.clip import Layout


def match_strides(layout: Layout) -> None:
    """Give every gradient the strides of its parameter.

    torch's fused CPU kernels read both in memory order and ignore strides: a channels-last gradient
    of a contiguous parameter would change the wrong weights without an error.
    """
    for shard in layout.shards:
        gradient = shard.param.grad
        if gradient is not None and gradient.stride() != shard.param.stride():
            shard.param.grad = torch.empty_like(shard.param).copy_(gradient)


def step_where(
    finite: bool | Tensor,
    optimizers: Sequence[Optimizer],
    closure: Callable[[], float] | None = None,
) -> None:
    """Step optimizers if ``finite`` holds. Fused kernels read a tensor on the device."""
    if isinstance(finite, Tensor) and _starts_momentum(optimizers):
        finite = bool(finite)
    if finite is False:
        return
    for optimizer in optimizers:
        if finite is True:
            optimizer.step(closure)
            continue
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        try:
            optimizer.step(closure)
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]


def _starts_momentum(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether a step would allocate momentum buffers on this rank.

    torch's fused SGD leaves them uninitialised if ``found_inf`` skips that step; the next step
    would add their contents to the weights.
    """
    return any(
        parameter.grad is not None and parameter not in optimizer.state
        for optimizer in optimizers
        for group in optimizer.param_groups
        if group.get("momentum")
        for parameter in group["params"]
    )
