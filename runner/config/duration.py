"""How long something lasts, counted in epochs, optimizer steps, samples or tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

Unit = Literal["ep", "ba", "sp", "tok"]

UNITS: dict[Unit, str] = {
    "ep": "epochs",
    "ba": "optimizer steps",
    "sp": "samples",
    "tok": "tokens",
}

# What a duration looks like, to follow "must be".
FORM = "a duration such as 3ep: a whole number of at least 1 and its unit, one of " + ", ".join(
    f"{unit} ({meaning})" for unit, meaning in UNITS.items()
)

PATTERN = re.compile(rf"([0-9]+(?:_[0-9]+)*)({'|'.join(UNITS)})")


@dataclass(frozen=True)
class Duration:
    """A whole number of units, such as 3 epochs.

    Attributes:
        value: how many, at least 1.
        unit: ``ep`` (epochs), ``ba`` (optimizer steps), ``sp`` (samples) or ``tok`` (tokens).

    Raises:
        ValueError: ``value`` is no integer of at least 1, or ``unit`` is not one of the four.
    """

    value: int
    unit: Unit

    def __post_init__(self) -> None:
        counts = isinstance(self.value, int) and not isinstance(self.value, bool)
        if not counts or self.value < 1 or self.unit not in UNITS:
            raise ValueError(f"{self.value}{self.unit} must be {FORM}")

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read ``3ep``, ``500ba``, ``100_000sp`` or ``1000000tok``.

        Raises:
            ValueError: ``text`` is no such duration; the message lists the four units.
        """
        match = PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"{text!r} must be {FORM}")
        return cls(int(match[1]), cast(Unit, match[2]))

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return f"{self.value}{self.unit}"
