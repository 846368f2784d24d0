"""One clipping as all ranks saw it: what is compared, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from runner.check.measures import Change
from runner.check.reference import combined, near, root
from runner.check.whole import Whole
from runner.config.notation import first_few

Mode = Literal["norm", "value", "adaptive"]


class ScaledGroup(NamedTuple):
    """Parameters that were scaled by one coefficient."""

    names: str
    coefficient: float
    norm: float  # of their gradients before the clipping


@dataclass(frozen=True)
class Clipped:
    """One clipping.

    Attributes:
        whole: the model and its gradients before the clipping.
        changes: what was done to each part, by rank.
        returned: the norm that the clipping returned, by rank.
        logged: the value that goes to the log, by rank.
        mode: the mode that was asked for.
        max_norm: its threshold.
        p: the exponent of the norm.
    """

    whole: Whole
    changes: list[list[Change]]
    returned: list[float | None]
    logged: list[float | None]
    mode: Mode
    max_norm: float
    p: float

    @cached_property
    def norm(self) -> float:
        """The true norm before the clipping."""
        return self.whole.norm(self.p)

    def norm_on(self, rank: int) -> float:
        """The norm that a rank returned, the true one if it returned none."""
        returned = self.returned[rank]
        return self.norm if returned is None else returned

    @property
    def all_changes(self) -> list[Change]:
        """The changes of all ranks."""
        return [change for row in self.changes for change in row]

    @cached_property
    def groups(self) -> list[ScaledGroup]:
        """Parameters by their coefficient; empty where some have none."""
        by_place: dict[tuple[str, tuple[int, ...]], float] = {}
        for change in self.all_changes:
            by_place[change.key, change.position] = change.coefficient
        scaled: list[tuple[float, int]] = []
        for number, unit in enumerate(self.whole.units):
            coefficient = by_place.get((unit.facts.key, unit.facts.position), math.nan)
            if math.isnan(coefficient):
                return []
            scaled.append((coefficient, number))
        groups: list[list[tuple[float, int]]] = []
        for coefficient, number in sorted(scaled):
            if not groups or not near(groups[-1][0][0], coefficient, self.tolerance):
                groups.append([])
            groups[-1].append((coefficient, number))
        return [self._scaled_group(group) for group in groups]

    def _scaled_group(self, group: list[tuple[float, int]]) -> ScaledGroup:
        units = [self.whole.units[number] for number in sorted(number for _, number in group)]
        norm = root(combined([unit.power for unit in units], self.p), self.p)
        names = first_few([unit.name for unit in units])
        return ScaledGroup(names, coefficient=group[0][0], norm=norm)

    @property
    def tolerance(self) -> float:
        """The relative error of a norm that types and sizes of the gradients explain."""
        return self.whole.tolerance


def applied(changes: Iterable[Change]) -> str:
    """Return the coefficients that were applied, in short."""
    values = [change.coefficient for change in changes if not math.isnan(change.coefficient)]
    if not values:
        return "none"
    low = min(values)
    high = max(values)
    return f"{low:.6g}" if near(low, high, 1e-5) else f"{low:.6g} to {high:.6g}"


def names_of(changes: Iterable[Change]) -> str:
    """Return the first names of parameters, each once."""
    return first_few(list(dict.fromkeys(change.name for change in changes)))


def became_nan(changes: Iterable[Change]) -> str:
    """Return that gradients are not finite after the clipping, where they were before it."""
    return f"gradients became NaN or inf: {names_of(changes)}"
