"""Compare the value of the loss of a batch with the losses of its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runner.booster.shown import Shown

_ROUNDINGS = 100  # by which sums of the same elements in another order may differ


@dataclass(frozen=True)
class Values:
    """A loss, or one of the terms that it adds up: of a batch, and of its parts.

    Attributes:
        whole: the value of the batch.
        parts: the values of its parts.
        margin: by how much values may differ within their precision.
    """

    whole: float
    parts: list[float]
    margin: float

    def is_near(self, expected: float) -> bool:
        """Return whether the value of the batch is as expected, or a mean over nothing."""
        return self.whole != self.whole or abs(expected - self.whole) <= self.margin

    def is_mean(self, counts: Sequence[float]) -> bool:
        """Return whether the value of the batch is the mean of its parts, weighted with counts."""
        return self.is_near(weighted_mean(self.parts, counts))

    def is_between(self) -> bool:
        """Return whether the value of the batch lies between the values of its parts, as a mean."""
        if any(value != value for value in self.parts):
            return False
        if not self.parts:
            return True
        lowest = min(self.parts) - self.margin
        return lowest <= self.whole <= max(self.parts) + self.margin

    def tells_no_mean(self) -> str:
        """Return why the values do not tell what the mean divides by; empty if they may."""
        if not all(math.isfinite(value) for value in (self.whole, *self.parts)):
            return "it is not finite"
        if abs(self.parts[0] - self.parts[1]) <= 10 * self.margin:
            return "parts of a batch have the same loss"
        return ""


def losses_of(whole: Shown, parts: Sequence[Shown]) -> Values:
    """Return the losses of a batch and of its parts."""
    losses = [part.value for part in parts]
    precision: float = torch.finfo(whole.loss.dtype).eps
    return Values(whole.value, losses, math.sqrt(precision) * _largest([whole.value, *losses]))


def terms_in(whole: Shown, parts: Sequence[Shown]) -> list[Values]:
    """Return what each term adds to the loss of a batch and of its parts, without penalties.

    A term may be small beside the loss. The whole loss takes the place of terms that were not
    recorded.
    """
    losses = losses_of(whole, parts)
    if any(len(part.terms) != len(whole.terms) for part in parts):
        return [losses]
    precision: float = torch.finfo(whole.loss.dtype).eps
    rounding = precision * _largest([losses.whole, *losses.parts])
    of_terms = []
    is_recorded = True
    for number, term in enumerate(whole.terms):
        if term.is_penalty:
            continue
        of_parts = [part.terms[number].value for part in parts]
        recorded = [value for value in of_parts if value is not None]
        if term.value is None or len(recorded) < len(parts):
            is_recorded = False
            continue
        margin = math.sqrt(precision) * _largest([term.value, *recorded]) + rounding
        of_terms.append(Values(term.value, recorded, margin))
    return of_terms if is_recorded else [*of_terms, losses]


def sums_of_alike(whole: Shown, parts: Sequence[Shown]) -> Values | None:
    """Return the losses, without rounding, if they add up several terms of one kind.

    Terms such as those of chunks of all labels take other samples in a part of the batch.
    """
    kinds = {(term.divisor, term.factor, term.form) for term in whole.terms if not term.is_penalty}
    if len(kinds) != 1 or len(whole.terms) == 1:
        return None
    precision: float = torch.finfo(whole.loss.dtype).eps
    losses = losses_of(whole, parts)
    margin = _ROUNDINGS * precision * _largest([losses.whole, *losses.parts])
    return Values(losses.whole, losses.parts, margin)


def _largest(values: Sequence[float]) -> float:
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0)


def weighted_mean(values: Sequence[float], counts: Sequence[float]) -> float:
    """Return the mean of values, weighted with counts of items; NaN without any."""
    if not sum(counts):
        return math.nan
    pairs = zip(values, counts, strict=True)
    return sum(count * value for value, count in pairs if count) / sum(counts)


def first_share(counts: Sequence[float]) -> float | None:
    """Return the share of the first part in the items of a batch; None if it has none."""
    return counts[0] / sum(counts) if sum(counts) else None
