"""Compare the loss of a batch with those of its parts, by their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from runner.booster.shown import Shown

_ROUNDINGS = 1  # of a loss, which one of its terms may be off by


def weighted_mean(parts: Sequence[Shown], items: Callable[[Any], float]) -> float:
    """Return the mean of the losses of parts, weighted with their items; NaN without any."""
    return weighted([part.value for part in parts], [items(part.batch) for part in parts])


def weighted(values: Sequence[float], counts: Sequence[float]) -> float:
    """Return the mean of values, weighted with counts of items; NaN without any."""
    if not sum(counts):
        return math.nan
    pairs = zip(values, counts, strict=True)
    return sum(count * value for value, count in pairs if count) / sum(counts)


def _size(whole: Shown, parts: Sequence[Shown]) -> float:
    """Return by how much losses may differ within their precision."""
    values = [abs(shown.value) for shown in (whole, *parts)]
    return float(torch.finfo(whole.loss.dtype).eps ** 0.5) * max(values)


def is_near(expected: float, whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether the loss of the whole is as expected, within the precision of the losses."""
    if whole.value != whole.value:
        return True  # a mean over nothing
    return abs(expected - whole.value) <= _size(whole, parts)


class Values(NamedTuple):
    """A loss, or one of the terms that it adds up: of a batch, and of its parts."""

    whole: float
    parts: list[float]


def compared_values(whole: Shown, parts: Sequence[Shown]) -> list[Values]:
    """Return what each term adds to the loss of a batch and of its parts, without penalties.

    A term may be small beside the loss. The whole loss takes the place of terms that were not
    recorded.
    """
    losses = Values(whole.value, [part.value for part in parts])
    if any(len(part.terms) != len(whole.terms) for part in parts):
        return [losses]
    several = []
    is_recorded = True
    for number, term in enumerate(whole.terms):
        if term.is_penalty:
            continue
        of_parts = [part.terms[number].value for part in parts]
        recorded = [value for value in of_parts if value is not None]
        if term.value is None or len(recorded) < len(parts):
            is_recorded = False
        else:
            several.append(Values(term.value, recorded))
    return several if is_recorded else [*several, losses]


def are_near(expected: float, values: Values, whole: Shown, parts: Sequence[Shown]) -> bool:
    """Return whether a term is as expected, within its precision and the rounding of the loss."""
    if values.whole != values.whole:
        return True  # a mean over nothing
    precision: float = torch.finfo(whole.loss.dtype).eps
    largest = max(abs(value) for value in (values.whole, *values.parts))
    losses = [abs(shown.value) for shown in (whole, *parts) if math.isfinite(shown.value)]
    margin = math.sqrt(precision) * largest + _ROUNDINGS * precision * max(losses, default=0.0)
    return abs(expected - values.whole) <= margin


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
