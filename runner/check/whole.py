"""The whole model, as all ranks describe it: what counts once, and which ranks hold it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from runner.check.parts import Facts
from runner.check.reference import combined, root

_TOLERANCE = {
    "torch.float64": 1e-6,
    "torch.float32": 1e-5,
    "torch.float16": 1e-3,
    "torch.bfloat16": 2.0**-7,
}
"""Relative error of a norm that the type of the gradients explains."""
_PER_ELEMENT = 2e-11  # what a float32 sum loses for each element of a tensor


@dataclass(eq=False, slots=True)
class Unit:
    """A part of the whole model that counts once, and the ranks that hold it."""

    facts: Facts  # of its first rank
    holders: dict[int, Facts] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)  # names of other parts that are the same one

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def power(self) -> float:
        return self.facts.power


class Whole:
    """The whole model, as the facts of all ranks describe it.

    Attributes:
        units: each part once. A plain tensor in no group whose values differ between ranks is one
            part for each value.
        undeclared: names of such tensors.
        unequal: names of replicas whose gradients differ between ranks.
        tied: pairs of names of parameters on different ranks that are one.
    """

    def __init__(self, ranks: list[list[Facts]]) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.undeclared: list[str] = []
        self.unequal: list[str] = []
        self.tied: list[tuple[str, str]] = []
        units = self._units(set())
        if self.undeclared:
            # Equal biases beside weights that differ are parameters of each rank too.
            units = self._units({name.rpartition(".")[0] for name in self.undeclared})
        self.units = [unit for unit in units if unit.facts.trained]
        self.untrained = [unit for unit in units if not unit.facts.trained]
        self._find_unequal()
        self._join_tied()

    def _units(self, apart: set[str]) -> list[Unit]:
        """Return each part once; parts of modules in ``apart`` are one if gradients are equal."""
        units: dict[tuple[Any, ...], Unit] = {}
        for rank, facts in enumerate(self.ranks):
            for fact in facts:
                key: tuple[Any, ...] = (fact.key, fact.position)
                while key in units and not _is_replica(units[key].facts, fact, apart):
                    if fact.name not in self.undeclared:
                        self.undeclared.append(fact.name)
                    key = (*key, "other value")
                unit = units.setdefault(key, Unit(fact))
                unit.holders[rank] = fact
        return list(units.values())

    def _find_unequal(self) -> None:
        """Note the replicas whose gradients differ between ranks."""
        for unit in self.units:
            tolerance = replica_tolerance(unit.facts.dtype)
            for fact in unit.holders.values():
                if fact is unit.facts:
                    continue
                same = projections_near((unit.power,), (fact.power,), tolerance)
                same = same and _same_gradient(unit.facts, fact)
                if not same and fact.name not in self.unequal:
                    self.unequal.append(fact.name)

    def _join_tied(self) -> None:
        """Join matrices on different ranks with equal weights and gradients.

        One of them is an embedding, or both are in ``groups``: stages share an embedding and a
        head, and experts that are copies of one matrix have gradients of their own.
        """
        if self.size == 1:
            return
        alike: dict[tuple[Any, ...], list[Unit]] = {}
        for unit in self.units:
            if len(unit.facts.shape) > 1:
                key = (unit.facts.shape, unit.facts.position, unit.facts.weight)
                alike.setdefault(key, []).append(unit)
        joined: set[int] = set()
        for copies in alike.values():
            copies.sort(key=lambda unit: not unit.facts.embeds)
            first = copies[0]
            for unit in copies[1:]:
                if _are_tied(first, unit):
                    first.tied.append(unit.facts.key)
                    first.holders |= unit.holders
                    self.tied.append((first.facts.key, unit.facts.key))
                    joined.add(id(unit))
        self.units = [unit for unit in self.units if id(unit) not in joined]

    def places(self) -> list[tuple[int, int]]:
        """Return for each unit its first rank, and its position among the parts of this rank."""
        positions: dict[int, int] = {}
        for facts in self.ranks:
            for position, fact in enumerate(facts):
                positions[id(fact)] = position
        places: list[tuple[int, int]] = []
        for unit in self.units:
            rank, fact = next(iter(unit.holders.items()))
            places.append((rank, positions[id(fact)]))
        return places

    @cached_property
    def tolerance(self) -> float:
        """The relative error of a norm that types and sizes of the gradients explain."""
        return tolerance_of([fact for facts in self.ranks for fact in facts])

    def norm(self, p: float) -> float:
        """Return the norm of the whole model, each element once."""
        return root(combined((unit.power for unit in self.units), p), p)


def tolerance_of(facts: Sequence[Facts]) -> float:
    """Return the relative error of a norm that types and sizes of the gradients explain."""
    gradients = [fact for fact in facts if fact.has_gradient]
    dtypes = {fact.dtype for fact in gradients}
    tolerance = max((_TOLERANCE.get(dtype, 1e-5) for dtype in dtypes), default=1e-5)
    if dtypes != {"torch.float64"}:
        tolerance += _PER_ELEMENT * max((fact.elements for fact in gradients), default=0)
    return tolerance


def _is_replica(first: Facts, second: Facts, apart: set[str]) -> bool:
    """Return whether facts of two ranks describe one part."""
    if not projections_near(first.weight, second.weight, 1e-4):
        return False
    module = second.name.rpartition(".")[0]
    return module not in apart or _same_gradient(first, second)


def _same_gradient(first: Facts, second: Facts) -> bool:
    return projections_near(first.gradient, second.gradient, replica_tolerance(first.dtype))


def _are_tied(first: Unit, second: Unit) -> bool:
    """Return whether two parts of equal weights on different ranks are one parameter."""
    if set(first.holders) & set(second.holders):
        return False
    in_groups = first.facts.pattern is not None and second.facts.pattern is not None
    if not (first.facts.embeds or in_groups) or not any(first.facts.gradient):
        return False
    return _same_gradient(first.facts, second.facts)


def projections_near(first: tuple[float, ...], second: tuple[float, ...], tolerance: float) -> bool:
    """Return whether projections are equal up to a share of their norm; NaN equals NaN."""
    scale = max((abs(value) for value in (*first, *second) if math.isfinite(value)), default=0.0)
    for a, b in zip(first, second, strict=True):
        if math.isfinite(a) != math.isfinite(b):
            return False
        if math.isfinite(a) and abs(a - b) > tolerance * scale:
            return False
    return True


def replica_tolerance(dtype: str) -> float:
    """Return by what share gradients of replicas may differ: kernels may add in another order."""
    return 2e-2 if "float16" in dtype else 1e-3


def names_missing(ranks: list[list[Facts]]) -> Iterator[tuple[int, list[str]]]:
    """Yield ranks, and the parameters that have a gradient on another rank but not on theirs."""
    everywhere: dict[str, set[int]] = {}
    for rank, facts in enumerate(ranks):
        for fact in facts:
            if fact.has_gradient:
                everywhere.setdefault(fact.name, set()).add(rank)
    for rank, facts in enumerate(ranks):
        missing = [f.name for f in facts if not f.has_gradient and f.name in everywhere]
        if missing:
            yield rank, missing
