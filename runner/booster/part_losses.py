"""Compare the loss of a batch with those of its parts, by their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runner.booster.shown import Shown


def weighted_mean(parts: Sequence[Shown], items: Callable[[Any], float]) -> float:
    """Return the mean of the losses of parts, weighted with their items; NaN without any."""
    counts = [items(part.batch) for part in parts]
    if not sum(counts):
        return float("nan")
    total = 0.0
    for count, part in zip(counts, parts, strict=True):
        if count:
            total += count * part.value
    return total / sum(counts)


def _size(whole: Shown, parts: Sequence[Shown]) -> float:
    """Return what differences of losses are compared with, times the precision of the losses."""
    dtype = whole.loss.dtype
    values = [abs(shown.value) for shown in (whole, *parts)]
    return float(torch.finfo(dtype).eps ** 0.5) * max(values)


def is_near(expected: float, whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether the loss of the whole is as expected, within the precision of the losses."""
    if whole.value != whole.value:
        return True  # a mean over nothing
    return abs(expected - whole.value) <= _size(whole, parts)


def is_between(whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether the loss of the whole lies between those of its parts, as a mean does."""
    values = [part.value for part in parts]
    if not values or any(value != value for value in values):
        return not values
    margin = _size(whole, parts)
    return min(values) - margin <= whole.value <= max(values) + margin


def untold_by_values(whole: Shown, parts: Sequence[Shown]) -> str:
    """Return why the losses of a batch and its parts do not tell what it divides by."""
    losses = [part.value for part in parts]
    if not all(math.isfinite(value) for value in (whole.value, *losses)):
        return "it is not finite"
    if abs(losses[0] - losses[1]) <= 10 * _size(whole, parts):
        return "parts of a batch have the same loss"
    return ""


def first_share(parts: Sequence[Shown], items: Callable[[Any], float]) -> float | None:
    """Return the share of the first part in the items of a batch; None if it has none."""
    counts = [items(part.batch) for part in parts]
    return counts[0] / sum(counts) if sum(counts) else None
