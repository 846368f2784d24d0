"""The ways to count items that agree with what losses have divided by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.booster.divisor import NOTHING, Divisor
from runner.booster.loss_graph import GraphError, Term, terms_of

_KEPT = 8  # observations of a way to count
_CHECKED = 64  # passes on an accelerator, after which one of so many is checked
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3}


class Observed(NamedTuple):
    """What the parts of a loss divided by, and the items of that batch by one way to count."""

    items: float
    divisors: tuple[float, ...]
    is_zero: bool  # the loss is 0, or NaN as a mean over nothing is


def tolerance_of(loss: Tensor) -> float:
    """Return by how much a divisor may differ from a count, as it is rounded."""
    return _TOLERANCES.get(loss.dtype, 4e-3)


def is_silent(loss: Tensor, terms: Sequence[Term]) -> bool:
    """Return whether a loss is 0 and divides by nothing, as that of a batch without labels."""
    return float(loss.detach()) == 0 and not any(term.divides and term.factor for term in terms)


@dataclass
class Candidate:
    """A way to count, with what was observed."""

    divisor: Divisor
    observed: list[Observed] = field(default_factory=list)

    def fits(self, tolerance: float) -> bool:
        """Return whether each part divides by the items times a constant, or by a constant."""
        parts = len(self.observed[0].divisors)
        fitting = [self._fits(part, tolerance) for part in range(parts)]
        constant = [self._is_constant(part, tolerance) for part in range(parts)]
        if not all(a or b for a, b in zip(fitting, constant, strict=True)):
            return False
        counts = {observed.items for observed in self.observed}
        if counts == {0}:
            return all(observed.is_zero for observed in self.observed)
        return any(fitting) or len(counts) == 1

    def _fits(self, part: int, tolerance: float) -> bool:
        ratio: float | None = None
        for observed in self.observed:
            items, divisor = observed.items, observed.divisors[part]
            if not items and observed.is_zero and divisor <= 1:
                continue  # nothing is divided by 0, 1, or a small number
            if not items or not divisor:
                return False
            ratio = divisor / items if ratio is None else ratio
            if not abs(divisor - ratio * items) <= tolerance * abs(divisor):
                return False
        return True

    def _is_constant(self, part: int, tolerance: float) -> bool:
        first = self.observed[0].divisors[part]
        numbers = [observed.divisors[part] for observed in self.observed]
        return all(abs(number - first) <= tolerance * abs(first) for number in numbers)

    def shortened(self) -> Candidate:
        """Return the candidate with a few of the observations, which show all that is known."""
        first = [seen for seen in self.observed if seen.items][:_KEPT]
        return Candidate(self.divisor, first or self.observed[:1])

    def scale(self, tolerance: float) -> float:
        """Return what the loss divides by for each item."""
        for part in range(len(self.observed[0].divisors)):
            if self._fits(part, tolerance):
                for observed in self.observed:
                    if observed.items:
                        return observed.divisors[part] / observed.items
        return 1.0


@dataclass
class Candidates:
    """The ways to count that agree with what losses of earlier batches divided by.

    Attributes:
        known: whether the one way that is left was read off a loss of torch.
        outer: whether a loss has more parts for more samples, so that only what divides their sum
            counts.
        factors: whether numbers that the parts are multiplied with depend on the batch.
        looks: how many batches were looked at to tell candidates apart.
        passes: how many losses were compared with the items.
    """

    candidates: list[Candidate]
    known: bool = False
    outer: bool = False
    factors: bool = False
    tolerance: float = 1e-12
    looks: int = 0
    passes: int = 0

    @property
    def divisor(self) -> Divisor:
        return self.candidates[0].divisor

    def items(self, batch: Any) -> float:
        """Return what the loss of a batch divides by, up to a constant factor."""
        return self._items(self.candidates[0], batch)

    def _items(self, candidate: Candidate, batch: Any) -> float:
        scale = 1.0 if self.known else candidate.scale(self.tolerance)
        return scale * candidate.divisor.items(batch)

    @property
    def is_settled(self) -> bool:
        """Whether there is one way to count."""
        return self.known or len(self.candidates) == 1

    def disagree(self, batch: Any) -> bool:
        """Return whether the candidates count a batch differently."""
        if self.is_settled:
            return False
        first = self.items(batch)
        margin = self.tolerance * abs(first)
        others = self.candidates[1:]
        return any(abs(self._items(other, batch) - first) > margin for other in others)

    def read(self, terms: Sequence[Term]) -> tuple[float, ...]:
        """Return what the parts of a loss divide by."""
        if self.outer:
            return (terms[0].outer,)
        return tuple(term.divisor / (term.factor if self.factors else 1.0) for term in terms)

    def after(self, batch: Any, loss: Tensor, terms: Sequence[Term]) -> Candidates:
        """Return the candidates that agree with one more batch too."""
        if is_silent(loss, terms):
            return self._after_silent(batch)
        divisors = self.read(terms)
        value = float(loss)
        is_zero = value == 0 or math.isnan(value)
        remaining = []
        for candidate in self.candidates:
            seen = Observed(candidate.divisor.items(batch), divisors, is_zero)
            extended = Candidate(candidate.divisor, [*candidate.observed, seen])
            same_parts = len(divisors) == len(extended.observed[0].divisors)
            if same_parts and extended.fits(self.tolerance):
                remaining.append(extended)
        return replace(self, candidates=remaining)

    def _after_silent(self, batch: Any) -> Candidates:
        """Prefer what counts no items, as the loss of a batch without items is 0."""
        remaining = []
        for candidate in self.candidates:
            if candidate.divisor.counts == NOTHING or not candidate.divisor.items(batch):
                remaining.append(candidate)
        return replace(self, candidates=remaining or self.candidates)

    def common(self, other: Candidates) -> Candidates:
        """Return the candidates that agree with what another rank has seen too."""
        if self.known or other.known:
            return self if self.known else other
        theirs = {each.divisor._replace(weight=None): each for each in other.candidates}
        remaining = []
        for candidate in self.candidates:
            counterpart = theirs.get(candidate.divisor._replace(weight=None))
            if counterpart is None:
                continue
            observed = dict.fromkeys([*candidate.observed, *counterpart.observed])
            together = Candidate(candidate.divisor, list(observed))
            parts = {len(seen.divisors) for seen in observed}
            if len(parts) == 1 and together.fits(self.tolerance):
                remaining.append(together.shortened())
        return replace(self, candidates=remaining, looks=max(self.looks, other.looks))

    def agree_with(self, loss: Tensor, items: float) -> bool:
        """Return whether a loss may divide by so many items; True if its graph does not tell."""
        self.passes += 1
        if self.known or loss.grad_fn is None:
            return True
        # To read a number waits for an accelerator.
        if loss.device.type != "cpu" and self.passes > _CHECKED and self.passes % _CHECKED:
            return True
        try:
            terms = terms_of(loss)
        except GraphError:
            return True
        divisors = self.read(terms)
        value = float(loss.detach())
        is_zero = value == 0 or math.isnan(value)
        if not items and is_silent(loss, terms):
            return True
        first = self.candidates[0]
        if first.divisor.counts == NOTHING:
            return is_zero or self._are_constants(divisors)
        if self.outer and len(terms) == 1:
            return True
        scale = first.scale(self.tolerance)
        if len(divisors) != len(first.observed[0].divisors):
            # The loss has other parts than in evaluation.
            near = [abs(divisor - items) <= self.tolerance * items for divisor in divisors]
            return is_zero or any(near)
        seen = Observed(items / scale, divisors, is_zero)
        return Candidate(first.divisor, [*first.observed, seen]).fits(self.tolerance)

    def _are_constants(self, divisors: Sequence[float]) -> bool:
        """Return whether a sum divides by nothing but the constants of earlier batches."""
        constants = {number for seen in self.candidates[0].observed for number in seen.divisors}
        for divisor in divisors:
            if not any(abs(divisor - number) <= self.tolerance * number for number in constants):
                return False
        return True

    def described(self, loss: Tensor) -> str:
        """Return what a loss divides by, for a message."""
        divisors = self.read(terms_of(loss))
        return " and ".join(f"{divisor:g}" for divisor in dict.fromkeys(divisors))

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the number of passes, as lists and dictionaries."""
        candidates = []
        for candidate in self.candidates:
            divisor = candidate.divisor._asdict()
            named = {name: value for name, value in divisor.items() if value is not None}
            observed = [list(observed) for observed in candidate.observed]
            candidates.append({"divisor": named, "observed": observed})
        names = ("known", "outer", "factors", "tolerance", "looks")
        return {"candidates": candidates, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Candidates:
        """Return what :meth:`state_dict` described."""
        candidates = []
        for saved in state["candidates"]:
            named = dict(saved["divisor"])
            named |= {"name": tuple(named["name"]), "mask": tuple(named["mask"])}
            observed = []
            for items, divisors, is_zero in saved["observed"]:
                observed.append(Observed(items, tuple(divisors), is_zero))
            candidates.append(Candidate(Divisor(**named), observed))
        return cls(**{**state, "candidates": candidates})
