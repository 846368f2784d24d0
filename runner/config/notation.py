"""Durations, numbers, names, metrics and exceptions: read from text, and as text in plain ASCII."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast


def rounded(value: float, digits: int = 3) -> str:
    """Format a number with ``digits`` significant digits, without trailing zeros."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = math.floor(math.log10(abs(value)))
    if -4 <= size < 6:
        return _without_zeros(f"{value:.{max(0, digits - 1 - size)}f}")
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{_without_zeros(mantissa)}e{int(power)}"


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def with_short_numbers(text: str) -> str:
    """Return ``text`` with six significant digits of numbers that have more than ten decimals."""
    long_number = r"(?<![\w.])\d+\.\d{11,}(?:e[+-]?\d+)?"
    return re.sub(long_number, lambda match: rounded(float(match[0]), 6), text)


def percent(share: float) -> str:
    """Format a share as a percentage of three significant digits."""
    if 0 < share < 0.001:
        return "under 0.1 %"
    if 0.999 < share < 1:
        return "over 99.9 %"
    return f"{rounded(100 * share)} %"


def clock(seconds: float) -> str:
    """Format a duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def plural(count: int, noun: str, form: str = "") -> str:
    """Format ``count`` with ``noun``, which gets an ``s`` unless there is exactly one."""
    return f"{count:{form}} {noun}{'' if count == 1 else 's'}"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Format a list of names, at most ``most`` of them: ``a, b and 4 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def ranks_as_text(ranks: Sequence[int]) -> str:
    """Format a list of ranks: ``rank 1``, ``ranks 0, 2``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {first_few([str(rank) for rank in ranks], 8)}"


LONGEST = 500  # characters of one exception's message in a line
MEMBERS = 3  # exceptions of a group that a line names


def in_one_line(error: BaseException) -> str:
    """Return an exception, its notes and its causes in one line.

    Of a message that has several paragraphs, the line has the first one.
    """
    parts = [_kind_and_message(error)]
    parts += [" ".join(str(note).split()) for note in getattr(error, "__notes__", ())]
    seen = {id(error)}
    cause = error.__cause__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        parts.append(f"from {_kind_and_message(cause)}")
        cause = cause.__cause__
    return "; ".join(parts)


def first_line(error: BaseException) -> str:
    """Return the class of an exception and the first line of its text."""
    return f"{type(error).__name__}: {message_of(error).strip().partition(chr(10))[0]}"


def message_of(error: BaseException) -> str:
    """Return the text of an exception, whose class may fail to give one."""
    try:
        return str(error)
    except Exception:
        return "<its text cannot be read>"


def _kind_and_message(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    paragraph = message_of(error).strip().partition("\n\n")[0]
    message = " ".join(paragraph.split())
    if len(message) > LONGEST:
        message = f"{message[:LONGEST]} ..."
    text = f"{name}: {message}" if message else name
    if not isinstance(error, BaseExceptionGroup):
        return text
    members = [in_one_line(member) for member in error.exceptions]
    return f"{text}: {first_few(members, MEMBERS)}"


_HIGHER = (
    "accuracy",
    "auroc",
    "average_precision",
    "cohen_kappa",
    "cosine_similarity",
    "explained_variance",
    "f1",
    "f1_score",
    "jaccard_index",
    "matthews_corr_coef",
    "pearson_corr_coef",
    "precision",
    "r2",
    "r2_score",
    "recall",
    "roc_auc",
    "spearman_corr_coef",
    "specificity",
)
"""Metrics of which a higher value is better, by the last part of their keys."""


def higher_is_better(metric: str) -> bool:
    """Return whether higher values of a metric are better: of an F1 score, not of a loss."""
    return metric.endswith("accuracy") or metric.rpartition("/")[2] in _HIGHER


Unit = Literal["ep", "ba", "sp", "tok", "min"]

UNITS: dict[Unit, str] = {"ep": "epochs", "ba": "optimizer steps", "sp": "samples", "tok": "tokens"}

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
        match = re.fullmatch(rf"([0-9]+(?:_[0-9]+)*)({'|'.join(units)})", str(text))
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
