"""The ways to count items that agree with what losses have divided by."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.booster.divisor import NOTHING, Divisor, items_of_each
from runner.booster.terms import Form, Term, forms_of
from runner.parallel.hooks import held_tensors

_KEPT = 8  # observations of a way to count
_LARGEST_EPSILON = 1e-2
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3}


class Observed(NamedTuple):
    """What the parts of a loss divided by, and the items of that batch by one way to count.

    ``factors`` are the numbers that the parts are multiplied with. They are left out where
    ``divisors`` contain them already. ``numbers`` are those that the batch holds, such as a weight
    of all its samples.
    """

    items: float
    divisors: tuple[float, ...]
    is_zero: bool  # the loss is 0, or NaN as a mean over nothing is
    factors: tuple[float, ...] = ()
    numbers: tuple[float, ...] = ()

    @property
    def has_no_items(self) -> bool:
        """Whether nothing was divided, as in a batch without labels."""
        return not self.items and self.is_zero

    def with_factors(self) -> Observed:
        """Return the same with divisors of the parts and of the factors together."""
        if not self.factors:
            return self
        pairs = zip(self.divisors, self.factors, strict=True)
        divisors = tuple(divisor / (factor or 1.0) for divisor, factor in pairs)
        return self._replace(divisors=divisors, factors=())


def tolerance_of(loss: Tensor, terms: Sequence[Term], batch: Any) -> float:
    """Return by how much a divisor may differ from a count, as it is rounded.

    Losses in float64 are exact, except if they divide by a sum of less precise values of the batch.
    """
    dtypes = {term.dtype for term in terms if term.dtype is not None}
    if loss.dtype == torch.float64:
        dtypes &= {tensor.dtype for tensor in held_tensors(batch)}
    return max(_TOLERANCES.get(dtype, 4e-3) for dtype in (loss.dtype, *dtypes))


def is_silent(loss: Tensor, terms: Sequence[Term]) -> bool:
    """Return whether a loss is 0 and divides by nothing, as a batch without labels gives."""
    return float(loss.detach()) == 0 and not any(term.divides and term.factor for term in terms)


def is_zero(loss: Tensor) -> bool:
    """Return whether a loss is 0, or NaN as a mean over nothing is."""
    value = float(loss.detach())
    return value == 0 or math.isnan(value)


def is_without_samples(loss: Tensor, terms: Sequence[Term]) -> bool:
    """Return whether a loss is 0 up to penalties of parameters, or a mean over nothing."""
    return is_zero(loss) or all(term.is_nothing for term in of_samples_in(terms))


def numbers_of(batch: Any) -> tuple[float, ...]:
    """Return the numbers that a batch holds beside the tensors of its samples."""
    numbers = []
    for tensor in held_tensors(batch):
        if not tensor.ndim and tensor.is_floating_point():
            numbers.append(float(tensor))
    return tuple(numbers)


def near(first: float, second: float, tolerance: float) -> bool:
    return abs(first - second) <= tolerance * abs(first)


def are_equal(numbers: Sequence[float], tolerance: float) -> bool:
    return all(near(numbers[0], number, tolerance) for number in numbers)


def _are_multiples(factors: Sequence[float], of: Sequence[float], tolerance: float) -> bool:
    """Return whether factors are the same multiple of the numbers that their batches hold."""
    if not all(of):
        return False
    return are_equal(
        [factor / number for factor, number in zip(factors, of, strict=True)], tolerance
    )


def of_samples_in(terms: Sequence[Term]) -> Sequence[Term]:
    """Return the parts of a loss, except penalties of parameters and parts multiplied by 0."""
    of_samples = [term for term in terms if not term.is_penalty]
    return [term for term in of_samples if term.factor] or of_samples or terms


@dataclass
class Candidate:
    """A way to count, with what was observed.

    A part of the loss divides by the items times a constant, or by the items plus an epsilon. A
    batch of 0 items may divide by the value of 1 item, as ``clamp(min=1)`` does.
    """

    divisor: Divisor
    observed: list[Observed] = field(default_factory=list)
    _scales: dict[float, float] = field(default_factory=dict, repr=False, compare=False)

    def fits(self, tolerance: float) -> bool:
        """Return whether each part divides by the items, as above, or by a constant."""
        return any(self._fits_all(epsilon, tolerance) for epsilon in self._epsilons())

    def epsilon(self, tolerance: float) -> float:
        """Return what is added to the items."""
        for epsilon in self._epsilons():
            if self._fits_all(epsilon, tolerance):
                return epsilon
        return 0.0

    def scale(self, tolerance: float) -> float:
        """Return what the loss divides by for each item."""
        if tolerance not in self._scales:
            self._scales[tolerance] = self._scale(tolerance)
        return self._scales[tolerance]

    def _scale(self, tolerance: float) -> float:
        epsilon = self.epsilon(tolerance)
        for part in range(self._parts):
            if self._fits(part, epsilon, tolerance):
                ratio = self._ratio(part, epsilon)
                if ratio is not None:
                    return ratio
        return 1.0

    def shortened(self) -> Candidate:
        """Return the candidate with a few of the observations, which show all that is known."""
        with_items = [seen for seen in self.observed if seen.items and not seen.is_zero][:_KEPT]
        zeros = [seen for seen in self.observed if seen.items and seen.is_zero][:1]
        return Candidate(self.divisor, [*with_items, *zeros] or self.observed[:1])

    @property
    def counts_nothing(self) -> bool:
        """Whether it counts items of a loss that was 0, which is unlikely."""
        return any(seen.is_zero and seen.items for seen in self.observed)

    def has_constant_part(self, tolerance: float) -> bool:
        """Return whether a part of the loss divides by the same number, whatever the items are."""
        with_items = Candidate(self.divisor, [seen for seen in self.observed if seen.items])
        if len({seen.items for seen in with_items.observed}) < 2:
            return False
        if len({len(seen.divisors) for seen in with_items.observed}) > 1:
            return False
        return any(with_items._is_constant(part, tolerance) for part in range(with_items._parts))

    @property
    def _parts(self) -> int:
        return len(self.observed[0].divisors) if self.observed else 0

    def _epsilons(self) -> Iterator[float]:
        yield 0.0
        first = next((seen for seen in self.observed if seen.items), None)
        if first is None or self.divisor.counts == NOTHING:
            return
        for divisor in first.divisors:
            if 0 < divisor - first.items <= _LARGEST_EPSILON:
                yield divisor - first.items

    def _fits_all(self, epsilon: float, tolerance: float) -> bool:
        if len({len(seen.divisors) for seen in self.observed}) > 1:
            return False
        if not self._has_constant_factors(tolerance):
            return False
        parts = range(self._parts)
        fitting = [self._fits(part, epsilon, tolerance) for part in parts]
        constant = [self._is_constant(part, tolerance) for part in parts]
        if not all(a or b for a, b in zip(fitting, constant, strict=True)):
            return False
        counts = {seen.items for seen in self.observed}
        if counts == {0}:
            return all(fitting)
        return any(fitting) or len(counts) == 1

    def _fits(self, part: int, epsilon: float, tolerance: float) -> bool:
        ratio = self._ratio(part, epsilon)
        if epsilon and ratio is not None and not near(1.0, ratio, tolerance):
            return False
        for seen in self.observed:
            divisor = seen.divisors[part]
            if seen.has_no_items and divisor <= 1:
                continue  # nothing is divided by 0, 1, or a small number
            count = (ratio or 1.0) * (seen.items or 1.0) + epsilon
            if not divisor or not near(divisor, count, tolerance):
                return False
        return True

    def _has_constant_factors(self, tolerance: float) -> bool:
        """Return whether each part is multiplied with the same number in all batches.

        Numbers of several parts may change if their sum does not, as in a mixup of two targets.
        """
        observed = [seen for seen in self.observed if not seen.has_no_items]
        factors = [seen.factors for seen in observed]
        sums = [sum(of_batch) for of_batch in factors if len(of_batch) > 1]
        have_sums = bool(sums) and len(sums) == len(factors)
        if have_sums and are_equal(sums, tolerance):
            return True
        numbers = list(zip(*(self._numbers(seen, tolerance) for seen in observed), strict=False))
        for factors_of_part in zip(*factors, strict=False):
            if are_equal(factors_of_part, tolerance):
                continue
            if not any(_are_multiples(factors_of_part, of, tolerance) for of in numbers):
                return False
        return True

    def _numbers(self, seen: Observed, tolerance: float) -> list[float]:
        """Return the numbers that a batch holds; NaN for the number of its items."""
        counts = (seen.items, seen.items or 1.0)
        return [
            math.nan if any(near(count, number, tolerance) for count in counts) else number
            for number in seen.numbers
        ]

    def _ratio(self, part: int, epsilon: float) -> float | None:
        """Return what a part divides by for each item; None if no batch had any."""
        for seen in self.observed:
            if seen.items:
                return (seen.divisors[part] - epsilon) / seen.items
        return None

    def _is_constant(self, part: int, tolerance: float) -> bool:
        first = self.observed[0].divisors[part]
        return all(near(first, seen.divisors[part], tolerance) for seen in self.observed)


@dataclass
class Candidates:
    """The ways to count that agree with what losses of earlier batches divided by.

    Attributes:
        known: whether the one way that is left was read off a loss of torch.
        outer: whether a loss has more parts for more samples, so that only what divides their sum
            counts.
        factors: whether numbers that the parts are multiplied with depend on the batch, so that
            they count as divisors.
        weighted: whether single elements were multiplied by numbers other than 0 and 1, and the
            parts of a batch multiplied the same samples by the same numbers.
        by_values: whether the losses of a batch and its parts told, as the graph does not.
        forms: how the parts of losses that were measured take samples or parameters.
        rounded: how many more batches are to be measured, as weights may agree by rounding.
        looks: how many batches were looked at to tell candidates apart.
    """

    candidates: list[Candidate]
    known: bool = False
    outer: bool = False
    factors: bool = False
    weighted: bool = False
    by_values: bool = False
    forms: tuple[Form, ...] = ()
    rounded: int = 0
    tolerance: float = 1e-12
    looks: int = 0

    @property
    def first(self) -> Candidate:
        return self.candidates[0]

    @property
    def divisor(self) -> Divisor:
        return self.first.divisor

    @property
    def scale(self) -> float:
        """What the loss divides by for each item."""
        return self.first.scale(self.tolerance)

    @property
    def epsilon(self) -> float:
        """What the loss adds to the items."""
        return self.first.epsilon(self.tolerance)

    def items(self, batch: Any) -> float:
        """Return what the loss of a batch divides by, up to an epsilon."""
        return self._items(self.first, batch)

    def multiplier(self, batch: Any) -> float:
        """Return what makes the mean of a batch a sum; a batch without items counts as one item."""
        return (self.items(batch) or self.scale) + self.epsilon

    def _items(self, candidate: Candidate, batch: Any) -> float:
        return candidate.scale(self.tolerance) * candidate.divisor.items(batch)

    @property
    def is_settled(self) -> bool:
        """Whether there is one way to count, whose weights do not depend on the batch."""
        return self.known or (len(self.candidates) == 1 and not self.rounded)

    def has(self, divisor: Divisor) -> bool:
        """Return whether a way to count, with whatever weights of classes, is among these."""
        named = divisor._replace(weight=None)
        return any(
            named == candidate.divisor._replace(weight=None) for candidate in self.candidates
        )

    def disagree(self, batch: Any) -> bool:
        """Return whether the candidates count a batch differently."""
        if self.is_settled:
            return False
        divisors = [candidate.divisor for candidate in self.candidates]
        expected = None
        for candidate, items in zip(self.candidates, items_of_each(divisors, batch), strict=True):
            count = candidate.scale(self.tolerance) * items
            if expected is None:
                expected = count
            elif not near(expected, count, self.tolerance):
                return True
        return False

    def read(self, terms: Sequence[Term]) -> tuple[float, ...]:
        """Return what the parts of a loss divide by, without penalties of parameters."""
        return self.observe(0.0, False, terms).divisors

    def observe(
        self, items: float, is_zero: bool, terms: Sequence[Term], numbers: tuple[float, ...] = ()
    ) -> Observed:
        """Return what the loss of a batch of ``items`` items, which holds ``numbers``, shows."""
        of_samples = of_samples_in(terms)
        divisors = tuple(term.divisor for term in of_samples)
        factors = tuple(term.factor for term in of_samples)
        if self.outer:
            divisors = (of_samples[0].outer,)
            factors = (of_samples[0].outer_factor,)
        seen = Observed(items, divisors, is_zero, factors, numbers)
        return seen.with_factors() if self.factors else seen

    def after(self, batch: Any, loss: Tensor, terms: Sequence[Term]) -> Candidates:
        """Return the candidates that agree with one more batch too."""
        if is_silent(loss, terms):
            return self._after_silent(batch)
        tolerance = max(self.tolerance, tolerance_of(loss, terms, batch))
        remaining = []
        is_nothing = is_without_samples(loss, terms)
        numbers = numbers_of(batch)
        for candidate in self.candidates:
            seen = self.observe(candidate.divisor.items(batch), is_nothing, terms, numbers)
            extended = Candidate(candidate.divisor, [*candidate.observed, seen])
            if extended.fits(tolerance):
                remaining.append(extended)
        remaining.sort(key=lambda candidate: candidate.counts_nothing)
        forms = self.forms_with(forms_of(terms))
        return replace(self, candidates=remaining, tolerance=tolerance, forms=forms)

    def forms_with(self, forms: Iterable[Form]) -> tuple[Form, ...]:
        """Return the forms of losses that were measured, and others."""
        return tuple((Counter(self.forms) | Counter(forms)).elements())

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
        if self.factors == other.factors:
            together = self._joined(other)
            if together.candidates or self.factors:
                return together
        # A number may be constant in the batches of each rank, and differ between ranks.
        return self._with_factors()._joined(other._with_factors())

    def _joined(self, other: Candidates) -> Candidates:
        tolerance = max(self.tolerance, other.tolerance)
        theirs: dict[Divisor, Candidate] = {}
        for candidate in other.candidates:
            theirs[candidate.divisor._replace(weight=None)] = candidate
        remaining = []
        for candidate in self.candidates:
            counterpart = theirs.get(candidate.divisor._replace(weight=None))
            if counterpart is None:
                continue
            observed = dict.fromkeys([*candidate.observed, *counterpart.observed])
            together = Candidate(candidate.divisor, list(observed))
            if self.by_values or together.fits(tolerance):
                remaining.append(together.shortened())
        remaining.sort(key=lambda candidate: candidate.counts_nothing)
        return replace(
            self,
            candidates=remaining,
            tolerance=tolerance,
            looks=max(self.looks, other.looks),
            weighted=self.weighted or other.weighted,
            forms=self.forms_with(other.forms),
            rounded=max(self.rounded, other.rounded),
        )

    def _with_factors(self) -> Candidates:
        """Return the candidates with numbers that multiply the parts counted as divisors."""
        candidates = []
        for candidate in self.candidates:
            observed = [seen.with_factors() for seen in candidate.observed]
            candidates.append(Candidate(candidate.divisor, observed))
        return replace(self, candidates=candidates, factors=True)

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as lists and dictionaries."""
        candidates = []
        for candidate in self.candidates:
            divisor = candidate.divisor._asdict()
            named = {name: value for name, value in divisor.items() if value is not None}
            observed = [list(observed) for observed in candidate.observed]
            candidates.append({"divisor": named, "observed": observed})
        names = (
            "known",
            "outer",
            "factors",
            "weighted",
            "by_values",
            "tolerance",
            "looks",
            "rounded",
        )
        state = {name: getattr(self, name) for name in names}
        return {"candidates": candidates, "forms": [list(form) for form in self.forms], **state}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Candidates:
        """Return what :meth:`state_dict` described."""
        candidates = []
        for saved in state["candidates"]:
            named = dict(saved["divisor"])
            named |= {"name": tuple(named["name"]), "mask": tuple(named["mask"])}
            observed = []
            for items, divisors, nothing, factors, numbers in saved["observed"]:
                seen = Observed(items, tuple(divisors), nothing, tuple(factors), tuple(numbers))
                observed.append(seen)
            candidates.append(Candidate(Divisor(**named), observed))
        forms = tuple(tuple(form) for form in state["forms"])
        return cls(**{**state, "candidates": candidates, "forms": forms})
