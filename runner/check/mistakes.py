"""Which mistake gives a wrong norm: each one predicts a number, and the right one fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from runner.check import rank_mistakes, sum_mistakes
from runner.check.measures import power_of_buffers
from runner.check.parts import Part
from runner.check.ranks import Ranks
from runner.check.reference import combined, near, power_sum
from runner.check.sums import Mistake, Sums, classes_of
from runner.check.whole import Whole
from runner.config.notation import first_few
from runner.gradients.shard import local

_EXPONENTS = (1.0, 2.0, math.inf)  # p of norms that are taken by mistake


@dataclass
class Evidence:
    """Sums of powers that mistakes are predicted from, the same on every rank.

    Attributes:
        sums: sums of powers of the gradients before clipping.
        sums_of_other_p: the same for other p.
        instead: norms of something else than these gradients, by what they are.
        extra: sums of powers on each rank of what does not belong to the norm, by what it is.
    """

    sums: Sums
    sums_of_other_p: list[Sums] = field(default_factory=list)
    instead: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[float]] = field(default_factory=dict)


class Explainer:
    """Names the mistake behind wrong norms; the first call is a collective of all ranks."""

    def __init__(
        self, whole: Whole, p: float, parts: Sequence[Part], model: nn.Module, ranks: Ranks
    ) -> None:
        self._whole = whole
        self._p = p
        self._parts = parts
        self._model = model
        self._ranks = ranks
        self._evidence: Evidence | None = None

    def mistake_behind(
        self, norms: Sequence[float | None], tolerance: float, factors: bool = True
    ) -> str | None:
        """Return the mistake that explains the norms of ranks, None if none does.

        Args:
            norms: the norm of each rank, None where it is not known.
            tolerance: relative error up to which a prediction fits.
            factors: whether plain factors, such as 1/2, are explanations.
        """
        if self._evidence is None:
            self._evidence = self._gather()
        limit = max(tolerance, 1e-6)
        true = self._evidence.sums.norm
        for mistake in mistakes(self._evidence, factors):
            differs = any(not near(norm, true, 2 * limit) for norm in mistake.predicted)
            if differs and _fits(mistake, norms, limit):
                return mistake.sentence
        return None

    def _gather(self) -> Evidence:
        """Return the sums of this step; a collective."""
        whole = self._whole
        p = self._p
        columns = [
            [_power(part.before, exponent) for part in self._parts] for exponent in _EXPONENTS
        ]
        columns.append([_power(part.after, p) for part in self._parts])
        columns.append([_power(local(part.parameter.detach()), p) for part in self._parts])
        ranks = self._ranks.gather((columns, power_of_buffers(self._model, p)))
        tables = [table for table, _ in ranks]
        powers = {number: unit.power for number, unit in enumerate(whole.units)}
        evidence = Evidence(Sums(whole, p, powers))
        for column, exponent in enumerate(_EXPONENTS):
            if exponent != p:
                sums = _sums_of_column(whole, exponent, tables, column)
                evidence.sums_of_other_p.append(sums)
        for column, label in (
            (-2, "this is the norm after clipping, not before"),
            (-1, "this is the norm of the weights, not of the gradients"),
        ):
            evidence.instead[label] = _sums_of_column(whole, p, tables, column).norm
        evidence.extra["the norm counts buffers of the model"] = [power for _, power in ranks]
        evidence.extra |= _frozen(whole)
        return evidence


def _sums_of_column(whole: Whole, p: float, tables: Sequence[Any], column: int) -> Sums:
    """Return the sums of each unit from one column of its first rank."""
    powers: dict[int, float] = {}
    for number, (rank, position) in enumerate(whole.places()):
        powers[number] = tables[rank][column][position]
    return Sums(whole, p, powers)


def _frozen(whole: Whole) -> dict[str, list[float]]:
    """Return the sum of powers of parameters that are not trained."""
    if not whole.untrained:
        return {}
    names = first_few([unit.name for unit in whole.untrained if unit.power])
    total = math.fsum(unit.power for unit in whole.untrained)
    return {f"frozen parameters counted: {names}": [total] * whole.size}


def mistakes(evidence: Evidence, factors: bool) -> Iterator[Mistake]:
    """Yield mistakes with the norms that they predict, the commonest first."""
    sums = evidence.sums
    classes = classes_of(sums.whole)
    if math.isinf(sums.p):
        yield Mistake.on_all(sums, "the norm of p=inf is always 1", 1.0)
    yield from rank_mistakes.of_this_rank(sums)
    yield from rank_mistakes.of_tied(sums)
    if len(classes) == 1:
        yield from rank_mistakes.of_ranks(sums)
        yield from rank_mistakes.of_one_class(sums, classes)
    else:
        yield from rank_mistakes.of_one_class(sums, classes)
        yield from rank_mistakes.of_ranks(sums)
    yield from sum_mistakes.of_p(sums, evidence.sums_of_other_p)
    for label, norm in evidence.instead.items():
        yield Mistake.on_all(sums, label, norm)
    total = sums.of(sums.all)
    for label, powers in evidence.extra.items():
        norms = [sums.root(combined([total, power], sums.p)) for power in powers]
        yield Mistake(label, norms)
    yield from sum_mistakes.of_left_out(sums)
    yield from sum_mistakes.of_types(sums)
    yield from rank_mistakes.of_two_classes(sums, classes)
    if factors:
        yield from sum_mistakes.of_factors(sums)


def _fits(mistake: Mistake, norms: Sequence[float | None], tolerance: float) -> bool:
    """Return whether a mistake predicts the norm of every rank."""
    pairs = zip(mistake.predicted, norms, strict=True)
    return all(norm is None or near(predicted, norm, tolerance) for predicted, norm in pairs)


def _power(gradient: Tensor | None, p: float) -> float:
    return 0.0 if gradient is None else float(power_sum(gradient, p))
