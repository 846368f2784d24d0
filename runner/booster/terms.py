"""The parts that a loss is a sum of, and what they divide by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TorchLoss(NamedTuple):
    """A call of a loss of torch that returned a mean.

    ``weight`` has a weight for each class; for each target if ``weighs_elements``.
    """

    targets: Tensor
    classes: bool
    ignored: int
    weight: Tensor | None
    weighs_elements: bool = False


class Term(NamedTuple):
    """A part of a loss, which is a sum of such parts.

    Attributes:
        divisor: what it divides by.
        outer: what the sum of all parts divides by too.
        factor: number that it is multiplied with, such as the weight of a penalty.
        outer_factor: number that the sum of all parts is multiplied with too.
        divides: whether it divides at all; a sum and a penalty of weights do not.
        call: the loss of torch that it is; None for operations of one's own.
        is_scaled: whether a number multiplies or divides it, be it 1 in this batch.
        averages: whether it is a mean over elements, which grow with the samples of a batch.
        weights: tensors that multiply or divide the elements of its sum or mean.
        is_penalty: whether it depends on parameters alone, and on no sample.
        summed: number of elements of the sum that it is; 0 if it is none.
        dtype: the least precise one of what it divides by; None if these are exact.
    """

    divisor: float
    outer: float
    factor: float
    outer_factor: float
    divides: bool
    call: TorchLoss | None = None
    is_scaled: bool = False
    averages: bool = False
    weights: tuple[Tensor, ...] = ()
    is_penalty: bool = False
    summed: int = 0
    dtype: torch.dtype | None = None

    @property
    def is_weighted(self) -> bool:
        """Whether other numbers than 0 and 1 multiply the elements of its sum or mean."""
        return any(not _is_mask(weight) for weight in self.weights)

    @property
    def weighs_unequally(self) -> bool:
        """Whether numbers that are not 0 differ from one another in a weight of its elements."""
        return any(not _is_mask(weight) and spread_of(weight) > 0 for weight in self.weights)


def class_weights_of(terms: Sequence[Term]) -> list[Tensor]:
    """Return the weights of classes of the losses of torch among the parts of a loss."""
    weights = []
    for term in terms:
        if term.call is None or term.call.weight is None or term.call.weighs_elements:
            continue
        weights.append(term.call.weight)
    return weights


def spread_of(weight: Tensor) -> float:
    """Return how far apart the elements are that are not 0, relative to the largest one."""
    elements = weight[weight != 0].double()
    if not elements.numel():
        return 0.0
    return float((elements.max() - elements.min()) / elements.abs().max())


def _is_mask(weight: Tensor) -> bool:
    """Return whether all elements are 0 or 1."""
    return weight.dtype == torch.bool or torch.equal(weight * weight, weight)
