"""What can be told of a criterion without calling it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional

from runner.booster.batch import BatchError
from runner.data.dataset import IGNORED

Criterion = Callable[[Any, Any], Tensor]


class Mean(Enum):
    """What a criterion of torch averages over."""

    CLASSES = "class targets that are not ignored, or their weights"
    ELEMENTS = "elements of the targets"
    OTHER = "samples, or what its class says"


_MEANS: Mapping[Any, Mean] = {
    nn.CrossEntropyLoss.forward: Mean.CLASSES,
    nn.NLLLoss.forward: Mean.CLASSES,
    functional.cross_entropy: Mean.CLASSES,
    functional.nll_loss: Mean.CLASSES,
    nn.MSELoss.forward: Mean.ELEMENTS,
    nn.L1Loss.forward: Mean.ELEMENTS,
    nn.SmoothL1Loss.forward: Mean.ELEMENTS,
    nn.HuberLoss.forward: Mean.ELEMENTS,
    nn.BCELoss.forward: Mean.ELEMENTS,
    nn.BCEWithLogitsLoss.forward: Mean.ELEMENTS,
    nn.KLDivLoss.forward: Mean.ELEMENTS,
    nn.PoissonNLLLoss.forward: Mean.ELEMENTS,
    nn.SoftMarginLoss.forward: Mean.ELEMENTS,
    nn.HingeEmbeddingLoss.forward: Mean.ELEMENTS,
    functional.mse_loss: Mean.ELEMENTS,
    functional.l1_loss: Mean.ELEMENTS,
    functional.smooth_l1_loss: Mean.ELEMENTS,
    functional.huber_loss: Mean.ELEMENTS,
    functional.binary_cross_entropy: Mean.ELEMENTS,
    functional.binary_cross_entropy_with_logits: Mean.ELEMENTS,
    functional.kl_div: Mean.ELEMENTS,
    functional.poisson_nll_loss: Mean.ELEMENTS,
    functional.soft_margin_loss: Mean.ELEMENTS,
    functional.hinge_embedding_loss: Mean.ELEMENTS,
}
"""The mean of each criterion of torch, by its method ``forward`` or as a function."""

_LOGITS = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)


def option_of(criterion: Any, name: str, default: Any) -> Any:
    """Return an attribute, an argument of a ``functools.partial``, or a default of a function."""
    keywords = getattr(criterion, "keywords", None) or {}
    if name in keywords:
        return keywords[name]
    if hasattr(criterion, name):
        return getattr(criterion, name)
    function = criterion.func if isinstance(criterion, partial) else criterion
    if not inspect.isfunction(function):
        return default
    parameter = inspect.signature(function).parameters.get(name)
    has_default = parameter is not None and parameter.default is not parameter.empty
    return parameter.default if parameter is not None and has_default else default


def is_of_torch(criterion: Any) -> bool:
    """Return whether a criterion is one of torch.

    Its mean is over class targets, over elements (:func:`averages_elements`), or over samples.
    """
    if isinstance(criterion, nn.Module):
        return type(criterion).forward.__module__ == nn.modules.loss.__name__
    function = criterion.func if isinstance(criterion, partial) else criterion
    weighted = isinstance(criterion, partial) and "weight" in criterion.keywords
    return getattr(function, "__module__", "") == functional.__name__ and not weighted


def mean_of(criterion: Any) -> Mean:
    """Return what a criterion of torch averages over, if it averages."""
    if isinstance(criterion, nn.Module):
        return _MEANS.get(type(criterion).forward, Mean.OTHER)
    function = criterion.func if isinstance(criterion, partial) else criterion
    return _MEANS.get(function, Mean.OTHER) if inspect.isroutine(function) else Mean.OTHER


def averages_elements(criterion: Any) -> bool:
    """Return whether a criterion is one of torch whose mean is over the elements of its targets."""
    return option_of(criterion, "reduction", "mean") == "mean" and compares_elements(criterion)


def compares_elements(criterion: Any) -> bool:
    """Return whether a criterion is one of torch that compares outputs and targets of one shape."""
    return mean_of(criterion) is Mean.ELEMENTS


def name_of(criterion: Any, model: nn.Module) -> str:
    """Return how a message names a loss."""
    if criterion is None:
        return f"the loss of {type(model).__name__}"
    function = criterion.func if isinstance(criterion, partial) else criterion
    return f"the criterion {getattr(function, '__name__', type(function).__name__)}"


def binary_outputs(criterion: Any) -> Literal["logits", "probabilities"] | None:
    """Return what a criterion compares with labels of 0 and 1, if it does."""
    function = criterion.func if isinstance(criterion, partial) else criterion
    if isinstance(criterion, nn.BCELoss) or function is functional.binary_cross_entropy:
        return "probabilities"
    logits = isinstance(criterion, _LOGITS)
    return "logits" if logits or function is functional.binary_cross_entropy_with_logits else None


def summed(criterion: Any) -> Criterion | None:
    """Return ``criterion`` with ``reduction="sum"``; None if it compares no classes."""
    has_arguments = isinstance(criterion, partial) and bool(criterion.args)
    if mean_of(criterion) is not Mean.CLASSES or has_arguments:
        return None
    if not isinstance(criterion, nn.Module):
        return partial(criterion, reduction="sum")
    criterion = copy.copy(criterion)
    criterion.reduction = "sum"
    return criterion  # type: ignore[no-any-return]


def cross_entropy_sum(outputs: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    """Return the cross entropy, summed over targets, or as ``reduction`` says.

    Args:
        outputs: logits [..., classes].
        targets: classes [...], or probabilities [..., classes].
        reduction: as of :func:`torch.nn.functional.cross_entropy`.

    Raises:
        BatchError: a target is no class of the outputs.
    """
    flat = targets.flatten(0, -2) if targets.is_floating_point() else targets.flatten()
    try:
        return functional.cross_entropy(
            outputs.flatten(0, -2), flat, ignore_index=IGNORED, reduction=reduction
        )
    except IndexError as error:
        classes = outputs.shape[-1]
        wrong = flat[(flat != IGNORED) & ((flat < 0) | (flat >= classes))]
        raise BatchError(
            f"the label {int(wrong[0])} is no class of outputs [..., {classes}], whose cross "
            f"entropy ignores {IGNORED} alone: use that for labels that are left out, give a "
            "criterion such as torch.nn.CrossEntropyLoss(ignore_index=-1), or, if the model "
            "computes the loss itself, let the DataLoader yield dictionaries"
        ) from error


def cross_entropy_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over the targets that are not ignored."""
    return cross_entropy_sum(outputs, targets, "mean")
