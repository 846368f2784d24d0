"""Compare the weights that a loss gives to samples in a batch and in the parts of it.

Weights that are relative to their batch, such as ``weight / weight.mean()``, leave what a mean
divides by as it is. The weights of a sample in a part of the batch show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runner.booster.batch import batch_size
from runner.booster.shown import Shown
from runner.booster.terms import class_weights_of, spread_of

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-5}
_OF_HALF = 0.05
_OF_ACCELERATOR = 1e-2  # which may round products of matrices
_SPREAD = 10  # tolerances by which weights have to differ from one another


def weights_vary(whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether samples, or classes, have other weights in a part of the batch."""
    start = 0
    for part in parts:
        end = start + batch_size(part.batch)
        if _differ_in_part(whole, part, slice(start, end)):
            return True
        start = end
    return False


def are_told_apart(weights: Iterable[Tensor]) -> bool:
    """Return whether weights differ by more than what parts of a batch may change in them."""
    return any(spread_of(weight) > _SPREAD * _tolerance(weight) for weight in weights)


def _differ_in_part(whole: Shown, part: Shown, rows: slice) -> bool:
    if len(part.terms) != len(whole.terms):
        return False
    samples = batch_size(whole.batch)
    for of_part, of_whole in zip(part.terms, whole.terms, strict=True):
        for first, second in zip(of_part.weights, of_whole.weights, strict=False):
            if not _is_part(first, second, rows, samples):
                return True
    of_classes = zip(class_weights_of(part.terms), class_weights_of(whole.terms), strict=False)
    return any(
        first.shape == second.shape and not _near(first, second) for first, second in of_classes
    )


def _is_part(part: Tensor, whole: Tensor, rows: slice, samples: int) -> bool:
    """Return whether weights belong to some rows; True also where that cannot be told."""
    if part.shape == whole.shape:
        return _near(part, whole)  # the same for all samples
    count = rows.stop - rows.start
    if whole.numel() * count != part.numel() * samples or whole.numel() % samples:
        return True
    by_samples = whole.reshape(samples, -1)[rows]
    if _near(part.reshape(count, -1), by_samples):
        return True
    by_positions = whole.reshape(-1, samples)[:, rows]
    return _near(part.reshape(-1, count), by_positions)


def _near(first: Tensor, second: Tensor) -> bool:
    tolerance = _tolerance(first)
    first = first.double()
    second = second.double()
    margin = tolerance * float(second.abs().nan_to_num().max()) if second.numel() else 0.0
    return torch.allclose(first, second, rtol=tolerance, atol=margin, equal_nan=True)


def _tolerance(weight: Tensor) -> float:
    if not weight.is_floating_point():
        return 0.0
    tolerance = _TOLERANCES.get(weight.dtype, _OF_HALF)
    return tolerance if weight.device.type == "cpu" else max(tolerance, _OF_ACCELERATOR)
