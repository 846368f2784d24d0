"""Criteria: their options, their sum instead of their mean, and a loss of zero."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.data.dataset import IGNORED

Criterion = Callable[[Any, Any], Tensor]

_SUMMABLE = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
_SUMMABLE_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)


def binary_outputs(criterion: Any) -> Literal["logits", "probabilities"] | None:
    """Return what a criterion compares with labels of 0 and 1; None if it is no such criterion."""
    function = criterion.func if isinstance(criterion, partial) else criterion
    if isinstance(criterion, nn.BCELoss) or function is functional.binary_cross_entropy:
        return "probabilities"
    modules = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
    logits = isinstance(criterion, modules)
    logits |= function is functional.binary_cross_entropy_with_logits
    return "logits" if logits else None


def option(criterion: Any, name: str, default: Any) -> Any:
    """Return an attribute of a criterion, or a keyword argument of a ``functools.partial``."""
    keywords = getattr(criterion, "keywords", None) or {}
    return keywords.get(name, getattr(criterion, name, default))


def summed(criterion: Any) -> Criterion | None:
    """Return ``criterion`` with ``reduction="sum"``; None if it is not a loss of torch."""
    if isinstance(criterion, nn.Module) and type(criterion).forward in _SUMMABLE:
        module: Any = copy.copy(criterion)
        module.reduction = "sum"
        return cast(Criterion, module)
    bound = isinstance(criterion, partial) and not criterion.args
    function = criterion.func if bound else criterion
    return partial(criterion, reduction="sum") if function in _SUMMABLE_FUNCTIONS else None


def cross_entropy_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross entropy of logits."""
    flat = targets.flatten(0, -2) if targets.is_floating_point() else targets.flatten()
    return functional.cross_entropy(
        outputs.flatten(0, -2), flat, ignore_index=IGNORED, reduction="sum"
    )


def zero_with_gradient(outputs: Any) -> Tensor:
    """Return 0 with a gradient of zeros for each tensor of ``outputs``."""
    total = sum(
        leaf.sum() * 0.0
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )
    assert isinstance(total, Tensor), "the model returned no tensor"
    return total


class CachedCopy:
    """A tensor and its copy on another device, which is renewed only after the tensor changed."""

    def __init__(self, tensor: Tensor | None) -> None:
        self._tensor = tensor
        self._copied: tuple[int, Tensor] | None = None

    def on(self, device: torch.device) -> Tensor | None:
        """Return the tensor on ``device``."""
        tensor = self._tensor
        if tensor is None or tensor.device == device:
            return tensor
        if self._copied is None or self._copied[0] != tensor._version:
            self._copied = (tensor._version, tensor.to(device))
        return self._copied[1]


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse collectives, in which no other rank would take part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func} waits for other ranks")
        return func(*args, **(kwargs or {}))
