"""What can be told of a criterion without calling it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional

from runner.booster.batch import BatchError
from runner.data.dataset import IGNORED

Criterion = Callable[[Any, Any], Tensor]

_SUMMABLE = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
_SUMMABLE_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_OVER_ELEMENTS = (
    nn.MSELoss.forward,
    nn.L1Loss.forward,
    nn.SmoothL1Loss.forward,
    nn.HuberLoss.forward,
    nn.BCELoss.forward,
    nn.BCEWithLogitsLoss.forward,
    nn.KLDivLoss.forward,
    nn.PoissonNLLLoss.forward,
    nn.SoftMarginLoss.forward,
    nn.HingeEmbeddingLoss.forward,
)
_FUNCTIONS_OVER_ELEMENTS = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.kl_div,
    functional.poisson_nll_loss,
    functional.soft_margin_loss,
    functional.hinge_embedding_loss,
)
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


def averages_elements(criterion: Any) -> bool:
    """Return whether a criterion is one of torch whose mean is over the elements of its targets."""
    return option_of(criterion, "reduction", "mean") == "mean" and compares_elements(criterion)


def compares_elements(criterion: Any) -> bool:
    """Return whether a criterion is one of torch that compares outputs and targets of one shape."""
    if isinstance(criterion, nn.Module):
        return type(criterion).forward in _OVER_ELEMENTS
    function = criterion.func if isinstance(criterion, partial) else criterion
    return function in _FUNCTIONS_OVER_ELEMENTS


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
    """Return ``criterion`` with ``reduction="sum"``; None if it is not a loss of torch."""
    if isinstance(criterion, nn.Module) and type(criterion).forward in _SUMMABLE:
        criterion = copy.copy(criterion)
        criterion.reduction = "sum"
        return criterion  # type: ignore[no-any-return]
    bound = isinstance(criterion, partial) and not criterion.args
    function = criterion.func if bound else criterion
    return partial(criterion, reduction="sum") if function in _SUMMABLE_FUNCTIONS else None


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
