"""The norm of the update that an optimizer would take, ‖ΔW‖, computed before its step.

SGD (with momentum, dampening and nesterov), Adam (with amsgrad) and AdamW, as torch documents
them. The update is all that the step adds to the weights, weight decay included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from runner.clip.second_moment import OptimizerMisfit, pieces
from runner.clip.stepped import Place, SteppedShards
from runner.gradients import Layout, ParamShard, transfer
from runner.gradients.shard import local

KINDS = (SGD, Adam, AdamW)
_MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # in a state


def require_known(optimizers: Sequence[Optimizer]) -> None:
    """Raise an ``OptimizerMisfit`` for an optimizer whose update is not known before its step."""
    for optimizer in optimizers:
        if type(optimizer) not in KINDS:  # a subclass may compute its step differently
            raise OptimizerMisfit(
                "clip.skip.of=update knows the updates of SGD, Adam and AdamW, and not of "
                f"{type(optimizer).__name__}: choose one of these, or of=norm, loss or any"
            )


class UpdateNorm:
    """Measures ‖ΔW‖ over all ranks before a step; made by all ranks, by one collective."""

    def __init__(self, optimizers: Sequence[Optimizer], layout: Layout) -> None:
        require_known(optimizers)
        self._layout = layout
        self._stepped = SteppedShards(optimizers, layout)

    @torch.no_grad()
    def measure(self, coef: Tensor | None) -> Tensor:
        """Return ‖ΔW‖ of the gradients as they are, multiplied by ``coef``; one collective."""
        layout = self._layout
        total = layout.number(0.0)
        for shard, gradient in zip(*layout.gradients(), strict=True):
            place = self._stepped.place(shard)
            if place is not None:  # else another rank steps it
                square = _square(shard, gradient, place, coef)
                total = total + square * self._stepped.weight(shard)
        [squares] = layout.totals([total])
        return squares.sqrt()


def _square(shard: ParamShard, gradient: Tensor, place: Place, coef: Tensor | None) -> Tensor:
    """Return ‖ΔW‖² of a shard, in the widest type."""
    optimizer, group = place
    update_of = _of_sgd if isinstance(optimizer, SGD) else _of_adam
    state = optimizer.state.get(shard.param, {})
    steps = float(state.get("step", 0.0))
    moments = {name: local(state[name]) for name in _MOMENTS if state.get(name) is not None}
    wide = transfer.widest(gradient.device)
    squares = []
    for parts in pieces(gradient, shard.weight, *moments.values()):
        g, weight, *values = (part.to(wide) for part in parts)
        if coef is not None:
            g = g * coef
        before = dict(zip(moments, values, strict=True))
        squares.append(update_of(g, weight, before, steps, group).square().sum())
    return torch.stack(squares).sum()


def _of_sgd(
    gradient: Tensor,
    weight: Tensor,
    before: Mapping[str, Tensor],
    steps: float,
    group: Mapping[str, Any],
) -> Tensor:
    """Return what torch's SGD subtracts from elements of a weight."""
    rate = float(group["lr"])
    direction = -gradient if group["maximize"] else gradient
    direction = direction + float(group["weight_decay"]) * weight
    momentum = float(group["momentum"])
    if momentum:
        buffer = direction
        if "momentum_buffer" in before:
            buffer = (
                momentum * before["momentum_buffer"] + (1 - float(group["dampening"])) * direction
            )
        direction = direction + momentum * buffer if group["nesterov"] else buffer
    return rate * direction


def _of_adam(
    gradient: Tensor,
    weight: Tensor,
    before: Mapping[str, Tensor],
    steps: float,
    group: Mapping[str, Any],
) -> Tensor:
    """Return what torch's Adam or AdamW subtracts from elements of a weight."""
    rate = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    decay = float(group["weight_decay"])
    decoupled = bool(group.get("decoupled_weight_decay"))
    gradient = -gradient if group["maximize"] else gradient
    if not decoupled:
        gradient = gradient + decay * weight
    first = (1 - beta1) * gradient
    second = (1 - beta2) * gradient.square()
    if before:
        first = beta1 * before["exp_avg"] + first
        second = beta2 * before["exp_avg_sq"] + second
    if "max_exp_avg_sq" in before:
        second = torch.maximum(second, before["max_exp_avg_sq"])
    number = steps + 1
    divisor = (second / (1 - beta2**number)).sqrt() + float(group["eps"])
    update: Tensor = rate / (1 - beta1**number) * first / divisor
    return update + rate * decay * weight if decoupled else update
