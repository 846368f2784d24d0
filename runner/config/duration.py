"""How long something lasts: epochs, optimizer steps, samples, tokens, or minutes of a clock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, cast

Unit = Literal["ep", "ba", "sp", "tok", "min"]

UNITS: dict[Unit, str] = {
    "ep": "epochs",
    "ba": "optimizer steps",
    "sp": "samples",
    "tok": "tokens",
}

MINUTES: Unit = "min"


@dataclass(frozen=True)
class Duration:
    """A whole number of units, such as 3 epochs; an interval may be minutes too."""

    value: int
    unit: Unit

    def __post_init__(self) -> None:
        if type(self.value) is not int or self.value < 1 or self.unit not in (*UNITS, MINUTES):
            raise ValueError(f"{self} {_form(UNITS)}")

    @classmethod
    def parse(cls, text: Any, units: dict[Unit, str] = UNITS) -> Duration:
        """Read ``3ep``, ``500ba``, ``100_000sp`` or ``1000000tok``."""
        pattern = rf"([0-9]+(?:_[0-9]+)*)({'|'.join(units)})"
        match = re.fullmatch(pattern, text) if isinstance(text, str) else None
        if match is None or not int(match[1]):
            raise ValueError(f"{text!r} {_form(units)}")
        return cls(int(match[1]), cast(Unit, match[2]))

    @classmethod
    def parse_interval(cls, text: Any) -> Duration:
        """Read a duration, or minutes such as ``10min``."""
        return cls.parse(text, {**UNITS, MINUTES: "minutes"})

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"


def _form(units: dict[Unit, str]) -> str:
    listed = ", ".join(f"{unit} ({meaning})" for unit, meaning in units.items())
    return f"must be a duration such as 3ep: a whole number of at least 1 and one of {listed}"
