"""torch's fused optimizers: they clip and skip a step by themselves, and need matching strides."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from runner.clip import Layout, Number

SCALING = (SGD, Adam, AdamW, Adagrad)
"""Optimizers whose fused kernels divide gradients by ``grad_scale``. A subclass may not."""

LARGEST_SCALE = 1e30
"""Largest divisor of gradients that a fused step takes: float32 has to hold it."""

_PARAMETER, _GRADIENT = attrgetter("param"), attrgetter("grad")


class Fold:
    """Leaves the multiplication of gradients to the step of fused optimizers, where that is right.

    The step reads each gradient anyway, so clipping in it saves a read and a write of all of them.
    """

    def __init__(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        self._optimizers, self._layout = optimizers, layout
        self._known: tuple[list[tuple[int, int]], bool] = ([], False)

    def takes(self, coef: Number) -> bool:
        """Return whether fused kernels multiply all gradients by ``coef`` as they step.

        A hook that runs before a step has to see clipped gradients, so then nothing is folded.
        """
        if not isinstance(coef, Tensor) and not coef * LARGEST_SCALE >= 1.0:
            return False
        if _global_optimizer_pre_hooks or not all(map(_can_scale, self._optimizers)):
            return False
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        now = [(id(group), len(group)) for group in groups]
        if self._known[0] != now:
            # With ZeRO stage 1 other ranks step some of them.
            stepped = {id(parameter) for group in groups for parameter in group}
            trained = [shard.param for shard in self._layout.shards if shard.param.requires_grad]
            float32 = {parameter.dtype for parameter in trained} == {torch.float32}
            self._known = now, float32 and stepped.issuperset(map(id, trained))
        return self._known[1]


def _can_scale(optimizer: Optimizer) -> bool:
    return (
        type(optimizer) in SCALING
        and not optimizer._optimizer_step_pre_hooks
        and all(group.get("fused") for group in optimizer.param_groups)
    )


def match_strides(layout: Layout) -> None:
    """Give every gradient the strides of its parameter.

    torch's fused CPU kernels read both in memory order and ignore strides: a channels-last gradient
    of a contiguous parameter would change the wrong weights without an error.
    """
    parameters = list(map(_PARAMETER, layout.shards))
    gradients = list(map(_GRADIENT, parameters))
    contiguous = {*map(type, gradients)} == {Tensor} and all(map(Tensor.is_contiguous, gradients))
    if contiguous and all(map(Tensor.is_contiguous, parameters)):
        return
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None or gradient.layout is not torch.strided:
            continue
        if gradient.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def step_where(finite: bool | Tensor, optimizers: Sequence[Optimizer], coef: Number = 1.0) -> None:
    """Step optimizers if ``finite`` holds. Fused kernels read a tensor on the device."""
    if isinstance(finite, Tensor) and _starts_momentum(optimizers):
        finite = bool(finite)
    if finite is False:
        return
    read: dict[str, Any] = {}
    if finite is not True:
        read["found_inf"] = (~finite).float()
    if isinstance(coef, Tensor):
        read["grad_scale"] = (1.0 / coef).float()
    elif coef != 1.0:
        read["grad_scale"] = torch.tensor(1.0 / coef, dtype=torch.float32)
    for optimizer in optimizers:
        vars(optimizer).update(read)
        try:
            optimizer.step()
        finally:
            for name in read:
                del vars(optimizer)[name]


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
