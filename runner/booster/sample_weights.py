"""Compare the weights that a loss gives to samples in a batch and in the parts of it.

Weights that are relative to their batch, such as ``weight / weight.mean()``, leave what a mean
divides by as it is. The weights of a sample in a part of the batch show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.booster.batch import batch_size
from runner.booster.divisor import tensors_of
from runner.booster.parts import in_two
from runner.booster.shown import Shown
from runner.booster.terms import class_weights_of, spread_of

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-5}
_HALF = (torch.bfloat16, torch.float16)
_ONE_SIDED = 4  # elements of which some differ upwards and some downwards if they are rounded
_OF_ACCELERATOR = 1e-2  # which may round products of matrices
_SPREAD = 10  # tolerances by which weights have to differ from one another


def weights_vary(whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether samples, or classes, have other weights in a part of the batch."""
    return any(_differ_in_part(whole, part, list(part.numbers)) for part in parts)


def are_over_their_mean(whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether weights of parts are those of the batch, divided by their mean."""
    samples = batch_size(whole.batch)
    changed = []
    for part in parts:
        rows = list(part.numbers)
        for of_part, of_whole in zip(part.terms, whole.terms, strict=False):
            for first, second in zip(of_part.weights, of_whole.weights, strict=False):
                if (
                    second.numel() % samples
                    or first.numel() * samples != len(rows) * second.numel()
                ):
                    continue
                chosen = second.reshape(samples, -1)[rows].double()
                over_mean = (chosen / chosen.mean()).flatten().to(first)
                if not _near(first.flatten(), chosen.flatten().to(first)):
                    changed.append(_near(first.flatten(), over_mean))
    return bool(changed) and all(changed)


def in_two_by_weight(whole: Shown, samples: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the samples of two parts of a batch.

    Samples that the loss selects come first: if they were selected because of the others, some of
    them are not selected in the first part. One of several goes to the second part, if that has no
    other one.
    """
    first, second = in_two(samples)
    cut = len(first)
    for term in whole.terms:
        for weight in (*term.weights, *term.selected):
            if not weight.ndim or len(weight) != samples:
                continue
            shares = (weight != 0).reshape(samples, -1).double().mean(1)
            if float(shares.min()) == float(shares.max()):
                continue
            order = shares.argsort(descending=True, stable=True).tolist()
            if 2 < int((shares > 0).sum()) <= cut:
                order = [*order[1:], order[0]]
            return order[:cut], order[cut:]
    return first, second


def are_told_apart(weights: Iterable[Tensor]) -> bool:
    """Return whether weights differ by more than what parts of a batch may change in them.

    Those in half precision may agree by their rounding.
    """
    single = [weight for weight in weights if not is_half(weight)]
    return any(spread_of(weight) > _SPREAD * _tolerance(weight) for weight in single)


def is_half(weight: Tensor) -> bool:
    """Return whether weights are in half precision."""
    return weight.dtype in _HALF


def is_held(weight: Tensor, batch: Any) -> bool:
    """Return whether weights are values of a tensor of the batch, or all but the first of each."""
    for _, values in tensors_of(batch):
        for candidate in (values, values[..., 1:]):
            if candidate.numel() == weight.numel() and _are_values(candidate, weight):
                return True
    return False


def _are_values(values: Tensor, weight: Tensor) -> bool:
    return torch.equal(values.reshape(-1).to(weight.device, weight.dtype), weight.reshape(-1))


def _differ_in_part(whole: Shown, part: Shown, rows: list[int]) -> bool:
    if len(part.terms) != len(whole.terms):
        return False
    samples = batch_size(whole.batch)
    for of_part, of_whole in zip(part.terms, whole.terms, strict=True):
        of_samples = (*of_part.weights, *of_part.selected)
        for first, second in zip(of_samples, (*of_whole.weights, *of_whole.selected), strict=False):
            if not _is_part(first, second, rows, samples):
                return True
    of_classes = zip(class_weights_of(part.terms), class_weights_of(whole.terms), strict=False)
    return any(
        first.shape == second.shape and not _near(first, second) for first, second in of_classes
    )


def _is_part(part: Tensor, whole: Tensor, rows: list[int], samples: int) -> bool:
    """Return whether weights belong to some rows; True also where that cannot be told."""
    if part.shape == whole.shape:
        return _near(part, whole)  # the same for all samples
    count = len(rows)
    if whole.numel() * count != part.numel() * samples or whole.numel() % samples:
        return True
    by_samples = whole.reshape(samples, -1)[rows]
    if _near(part.reshape(count, -1), by_samples):
        return True
    by_positions = whole.reshape(-1, samples)[:, rows]
    return _near(part.reshape(-1, count), by_positions)


def _near(first: Tensor, second: Tensor) -> bool:
    if is_half(first):
        return _differ_by_rounding(first, second)
    tolerance = _tolerance(first)
    first = first.double()
    second = second.double()
    margin = tolerance * float(second.abs().nan_to_num().max()) if second.numel() else 0.0
    return torch.allclose(first, second, rtol=tolerance, atol=margin, equal_nan=True)


def _differ_by_rounding(first: Tensor, second: Tensor) -> bool:
    """Return whether weights in half precision differ by rounding only, as outputs do.

    A number of the batch, such as a mean, would move all weights in the same direction.
    """
    precision = torch.finfo(first.dtype).eps
    first = first.double().reshape(-1)
    second = second.double().reshape(-1)
    if not torch.allclose(first, second, rtol=2 * precision, atol=0.0, equal_nan=True):
        return False
    above = int((first > second).sum())
    below = int((first < second).sum())
    return above + below < _ONE_SIDED or min(above, below) > 0


def _tolerance(weight: Tensor) -> float:
    if not weight.is_floating_point():
        return 0.0
    tolerance = _TOLERANCES[weight.dtype]
    return tolerance if weight.device.type == "cpu" else max(tolerance, _OF_ACCELERATOR)
