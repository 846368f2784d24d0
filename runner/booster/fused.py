"""torch's fused optimizers: they clip and skip a step by themselves, and need matching strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from runner.clip import Layout, Number
from runner.clip.mode import multiply
from runner.clip.shard import ParamShard

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
        self._optimizers = optimizers
        self._layout = layout
        self._known: tuple[Any, list[ParamShard] | None] | None = None

    def scaled(self, some: bool) -> Sequence[Optimizer]:
        """Return the optimizers whose gradients the coefficient multiplies."""
        if not some:
            return self._optimizers
        left_out = {id(shard.param) for shard in self._layout.shards if not shard.scaled}
        return [
            each
            for each in self._optimizers
            if any(id(p) not in left_out for group in each.param_groups for p in group["params"])
        ]

    def takes(self, coef: Number, some: bool = False) -> bool:
        """Return whether fused kernels step all float32 gradients that ``coef`` multiplies.

        If so, those of them that no optimizer steps are multiplied here. A hook that runs before a
        step has to see clipped gradients, so then nothing is folded.
        """
        if not isinstance(coef, Tensor) and not coef * LARGEST_SCALE >= 1.0:
            return False
        scaled = self.scaled(some)
        if _global_optimizer_pre_hooks or not all(map(_can_scale, scaled)):
            return False
        groups = [group["params"] for each in scaled for group in each.param_groups]
        now = some, [(id(group), len(group)) for group in groups]
        if self._known is None or self._known[0] != now:
            self._known = now, self._left_over(groups, some)
        left = self._known[1]
        if left is None:
            return False
        multiply([g for shard in left if (g := shard.gradient) is not None], coef)
        return True

    def _left_over(self, groups: Sequence[Sequence[Tensor]], some: bool) -> list[ParamShard] | None:
        """Return the shards to multiply that no optimizer steps; None if fused steps cannot do it.

        With ZeRO stage 1 another rank steps them. The steps cannot do it if a parameter is not
        float32, or if one optimizer also has gradients that are left out.
        """
        stepped = {id(parameter) for group in groups for parameter in group}
        trained = [shard for shard in self._layout.shards if shard.param.requires_grad]
        if some:
            if any(id(shard.param) in stepped for shard in trained if not shard.scaled):
                return None
            trained = [shard for shard in trained if shard.scaled]
        if {s.param.dtype for s in trained if id(s.param) in stepped} - {torch.float32}:
            return None
        return [shard for shard in trained if id(shard.param) not in stepped]


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


def step_where(
    finite: bool | Tensor,
    optimizers: Sequence[Optimizer],
    closure: Callable[[], float] | None = None,
    coef: Number = 1.0,
    scaled: Sequence[Optimizer] | None = None,
) -> None:
    """Step optimizers if ``finite`` holds. Fused kernels read a tensor on the device."""
    if isinstance(finite, Tensor) and _starts_momentum(optimizers):
        finite = bool(finite)
    if finite is False:
        return
    skip: dict[str, Tensor] = {}
    if finite is not True:
        skip["found_inf"] = (~finite).float()
    divide = dict(skip)
    if isinstance(coef, Tensor):
        divide["grad_scale"] = (1.0 / coef).float()
    elif coef != 1.0:
        divide["grad_scale"] = torch.tensor(1.0 / coef, dtype=torch.float32)
    for optimizer in optimizers:
        read = divide if scaled is None or optimizer in scaled else skip
        vars(optimizer).update(read)
        try:
            optimizer.step(closure)
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
