"""Whether gradients were clipped at the right place of a step: marks from check to check.

The first check of a process registers a hook on all optimizers, so the order of the calls is known
from the second step on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from runner.check.parts import Part
from runner.gradients.shard import local

_stepped = WeakIdKeyDictionary()  # for each parameter the gradient that was stepped last
_clipped = WeakIdKeyDictionary()  # for each parameter its version, and the gradient, when clipped
_hooks: list[Any] = []


class _Mark:
    """A gradient at some time: the tensor and how often it had been written."""

    def __init__(self, parameter: Tensor, gradient: Tensor) -> None:
        self.weight_version = local(parameter)._version
        self.gradient = TensorWeakRef(gradient)
        self.version = gradient._version

    def same_tensor(self, gradient: Tensor) -> bool:
        return self.gradient() is gradient

    def unchanged(self, gradient: Tensor) -> bool:
        return self.same_tensor(gradient) and self.version == gradient._version


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _stepped[parameter] = _Mark(parameter, local(parameter.grad))


def entered(parts: list[Part]) -> list[str]:
    """Return what is wrong with the order of calls up to a clipping."""
    if not _hooks:
        hook = register_optimizer_step_post_hook(_after_step)
        _hooks.append(hook)
    parts = [part for part in parts if part.gradient is not None and part.parameter.requires_grad]
    if not parts:
        return []
    problems = []
    if all(_was_stepped(part) for part in parts):
        problems.append(
            "clipped after the step: these gradients were already stepped by the optimizer"
        )
    if all(_was_clipped(part) for part in parts):
        problems.append(
            "clipped per microbatch: more gradients were added to clipped ones, without a step "
            "between; clip once, after the last backward() of a step"
        )
    return problems


def _was_stepped(part: Part) -> bool:
    """Return whether an optimizer stepped this gradient, and nothing has changed it since."""
    mark: _Mark | None = _stepped.get(part.parameter)  # type: ignore[no-untyped-call]
    gradient = _gradient_of(part)
    return mark is not None and mark.unchanged(gradient)


def _was_clipped(part: Part) -> bool:
    """Return whether this gradient was clipped, then added to, without a step of the weights."""
    mark: _Mark | None = _clipped.get(part.parameter)  # type: ignore[no-untyped-call]
    gradient = _gradient_of(part)
    if mark is None or not mark.same_tensor(gradient):
        return False
    stepped = mark.weight_version != local(part.parameter)._version
    return mark.version < gradient._version and not stepped


def _gradient_of(part: Part) -> Tensor:
    """Return the tensor itself, which optimizers and other checks see; the part has a gradient."""
    return local(part.parameter.grad)  # type: ignore[arg-type]


def left(parts: list[Part], finite: bool) -> None:
    """Remember the gradients that were clipped; a step that is not finite may be skipped."""
    for part in parts:
        gradient = part.parameter.grad
        _clipped.pop(part.parameter, None)  # type: ignore[no-untyped-call]
        if gradient is not None and finite:
            _clipped[part.parameter] = _Mark(part.parameter, local(gradient))
