"""How long something lasts: epochs, optimizer steps, samples, tokens, or minutes of a clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

Unit = Literal["ep", "ba", "sp", "tok"]

UNITS: dict[Unit, str] = {
    "ep": "epochs",
    "ba": "optimizer steps",
    "sp": "samples",
    "tok": "tokens",
}

MINUTES = "min"


def _form(units: Mapping[Any, str]) -> str:
    """Return what a duration looks like, to follow "must be"."""
    listed = ", ".join(f"{unit} ({meaning})" for unit, meaning in units.items())
    return f"a duration such as 3ep: a whole number of at least 1 and its unit, one of {listed}"


FORM = _form(UNITS)
INTERVAL_FORM = _form({**UNITS, MINUTES: "minutes"})

_NUMBER = "([0-9]+(?:_[0-9]+)*)"
PATTERN = re.compile(rf"{_NUMBER}({'|'.join(UNITS)})")
INTERVAL_PATTERN = re.compile(rf"{_NUMBER}({'|'.join(UNITS)}|{MINUTES})")


@dataclass(frozen=True)
class Duration:
    """A whole number of units, such as 3 epochs."""

    value: int
    unit: Unit

    def __post_init__(self) -> None:
        counts = isinstance(self.value, int) and not isinstance(self.value, bool)
        if not counts or self.value < 1 or self.unit not in UNITS:
            raise ValueError(f"{self.value}{self.unit} must be {FORM}")

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read ``3ep``, ``500ba``, ``100_000sp`` or ``1000000tok``."""
        match = PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"{text!r} must be {FORM}")
        return cls(int(match[1]), cast(Unit, match[2]))

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return f"{self.value}{self.unit}"


@dataclass(frozen=True)
class Minutes:
    """A whole number of minutes of a clock, at least 1."""

    value: int

    def __post_init__(self) -> None:
        if self.value < 1:
            raise ValueError(f"{self} must be {INTERVAL_FORM}")

    @property
    def seconds(self) -> int:
        """The same in seconds."""
        return 60 * self.value

    def __str__(self) -> str:
        """The text that `parse_interval` reads."""
        return f"{self.value}{MINUTES}"


Interval = Duration | Minutes


def parse_interval(text: str) -> Interval:
    """Read a duration, or minutes such as ``10min``."""
    match = INTERVAL_PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} must be {INTERVAL_FORM}")
    number, unit = int(match[1]), match[2]
    return Minutes(number) if unit == MINUTES else Duration(number, cast(Unit, unit))
