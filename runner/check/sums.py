"""What a norm is made of: sums of powers by unit, and the classes that code for clipping knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runner.check.reference import combined, root
from runner.check.whole import Unit, Whole
from runner.config.notation import first_few


@dataclass
class Sums:
    """Sums of powers of each unit of a model, for one p."""

    whole: Whole
    p: float
    powers: dict[int, float]  # by the position of the unit in ``whole.units``
    units: Sequence[Unit] = field(init=False)

    def __post_init__(self) -> None:
        self.units = self.whole.units

    def of(self, numbers: Sequence[int]) -> float:
        """Return the sum over some units, each once."""
        return combined([self.powers[number] for number in numbers], self.p)

    def on_rank(self, numbers: Sequence[int], rank: int) -> float:
        """Return the sum over what one rank holds of some units."""
        return self.of([number for number in numbers if rank in self.units[number].holders])

    def root(self, total: float) -> float:
        return root(total, self.p)

    def norms_of_ranks(self) -> list[float]:
        """Return the norm of what each rank holds."""
        return [self.root(self.on_rank(self.all, rank)) for rank in range(self.whole.size)]

    @property
    def all(self) -> list[int]:
        return list(range(len(self.units)))

    @property
    def norm(self) -> float:
        return self.root(self.of(self.all))


@dataclass
class Mistake:
    """What goes wrong, in a sentence, and the norm that each rank then gets."""

    sentence: str
    predicted: list[float]  # by rank

    @classmethod
    def on_all(cls, sums: Sums, sentence: str, norm: float) -> Mistake:
        """Return a mistake that gives the same norm on every rank."""
        return cls(sentence, [norm] * sums.whole.size)


@dataclass
class Class:
    """Units that code for clipping treats in one way."""

    label: str
    kind: str  # groups, sharded, replicated, alone
    numbers: list[int]


def classes_of(whole: Whole) -> list[Class]:
    """Return the classes of a model's units: groups, shards, replicas, parameters of one rank."""
    classes: dict[tuple[str, str], Class] = {}
    for number, unit in enumerate(whole.units):
        kind = _kind_of(unit, whole)
        key = (kind, unit.facts.pattern or "")
        classes.setdefault(key, Class("", kind, [])).numbers.append(number)
    for group in classes.values():
        names = list(dict.fromkeys(whole.units[number].name for number in group.numbers))
        group.label = first_few(names)
    return list(classes.values())


def _kind_of(unit: Unit, whole: Whole) -> str:
    if unit.facts.pattern is not None:
        return "groups"
    if unit.facts.position:
        return "sharded"
    if unit.facts.name in whole.undeclared:
        return "undeclared"
    return "replicated" if len(unit.holders) > 1 else "alone"
