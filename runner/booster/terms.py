"""The parts that a loss is a sum of, and what they divide by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Form = tuple[str, ...]
"""Operations that may select elements of a part, in the order of their names."""

MASKED = "a mask with zeros"


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
        form: operations that select or weigh its elements, as far as they were read.
        value: what it adds to the loss, up to its sign; None where that was not recorded.
        is_empty: whether its sum or mean is over no element.
        selected: masks of the elements that were selected, in a measurement.
        ranked: among how many elements the largest or smallest ones are taken; 0 if none are.
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
    form: Form = ()
    value: float | None = None
    is_empty: bool = False
    selected: tuple[Tensor, ...] = ()
    ranked: int = 0

    @property
    def is_nothing(self) -> bool:
        """Whether it is 0 whatever the outputs are: multiplied with 0, or over no element."""
        is_left_out = any(not bool(weight.any()) for weight in (*self.weights, *self.selected))
        return not self.factor or self.is_empty or is_left_out

    @property
    def is_weighted(self) -> bool:
        """Whether other numbers than 0 and 1 multiply the elements of its sum or mean."""
        return any(not _is_mask(weight) for weight in self.weights)

    @property
    def weighs_unequally(self) -> bool:
        """Whether numbers that are not 0 differ from one another in a weight of its elements."""
        return any(not _is_mask(weight) and spread_of(weight) > 0 for weight in self.weights)


def forms_of(terms: Sequence[Term]) -> list[Form]:
    """Return how the parts that are not multiplied with 0 take samples or parameters.

    Masks with zeros have a form of their own.
    """
    forms = []
    masks = set()
    for term in terms:
        if not term.factor:
            continue
        form = ("penalty", *term.form) if term.is_penalty else term.form
        without_mask = tuple(name for name in form if name != MASKED)
        forms.append(without_mask)
        if MASKED in form:
            masks.add((MASKED, *without_mask))
    return [*forms, *sorted(masks)]


def penalties_of(terms: Sequence[Term]) -> list[float]:
    """Return what multiplies the penalties of parameters in a loss."""
    multipliers = []
    for term in terms:
        if term.is_penalty and term.factor:
            multipliers.append(term.factor / term.divisor if term.divisor else math.inf)
    return multipliers


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
