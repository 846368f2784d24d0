"""Key ``data.leave_out``: samples that a run does not read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import PlainValidator

from runner.config.section import Conflicts, Section, key

_MOST = 10_000_000  # numbers of one range


def _numbers(value: Any) -> list[int | str]:
    """Check numbers, and ranges of them such as ``520..540``, both ends included."""
    numbers = value if isinstance(value, list) else [value]
    for number in numbers:
        match = re.fullmatch(r"(\d+)\.\.(\d+)", number) if isinstance(number, str) else None
        is_range = match is not None and 0 <= int(match[2]) - int(match[1]) < _MOST
        if not is_range and not (type(number) is int and number >= 0):
            raise ValueError("must be a list of numbers and ranges, such as [520..540,600]")
    return numbers


def numbers_of(numbers: Iterable[int | str]) -> Iterator[int]:
    """Yield the numbers that :data:`Ranges` names."""
    for number in numbers:
        if isinstance(number, str):
            first, _, last = number.partition("..")
            yield from range(int(first), int(last) + 1)
        else:
            yield number


def as_ranges(numbers: Iterable[int]) -> str:
    """Return the text of numbers in a row: ``7,11..13``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("..".join(str(end) for end in part) for part in parts)


Ranges = Annotated[list[int | str], PlainValidator(_numbers)]


class LeaveOut(Section):
    """Samples that are not read from where a run starts, or a branch, by steps or by indices."""

    steps: Ranges = key("leave out what these steps would read, as [520..540,600]", [])
    samples: Ranges = key("leave out these samples of the data set, as [17,30..33]", [])

    @property
    def names_any(self) -> bool:
        """Whether anything is left out."""
        return bool(self.steps or self.samples)

    @property
    def steps_left_out(self) -> frozenset[int]:
        """The numbers of the steps."""
        return frozenset(numbers_of(self.steps))

    @property
    def samples_left_out(self) -> frozenset[int]:
        """The indices of the samples."""
        return frozenset(numbers_of(self.samples))

    def conflicts(self) -> Conflicts:
        """Yield steps that no run has."""
        if 0 in self.steps_left_out:
            yield "steps", "steps are counted from 1"
