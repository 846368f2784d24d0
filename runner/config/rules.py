"""What a value may be: each rule reads one value, or refuses it and says what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runner.config.duration import FORM, Duration
from runner.config.folders import options


@dataclass(frozen=True)
class Rule:
    """What one key may hold.

    Attributes:
        text: what is allowed, to follow "must be".
        read: the value in its final type; raises ValueError where it is not allowed, `Refusal`
            where there is more to say than ``text``. It never turns text into a number or a
            truth value into a count: nothing typed is guessed at.
        names: where only these names are allowed, the names.
    """

    text: str
    read: Callable[[Any], Any]
    names: tuple[str, ...] = ()


class Refusal(ValueError):
    """A value that is refused for a reason which the rule's text does not tell; its own does."""


def integer(least: int, most: int | None = None) -> Rule:
    """A whole number of at least ``least`` and at most ``most``."""

    def read(value: Any) -> int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < least or (most is not None and value > most):
            raise ValueError
        return int(value)

    upper = "" if most is None else f" and at most {most}"
    return Rule(f"an integer of at least {least}{upper}", read)


def number(above: float) -> Rule:
    """A finite number greater than ``above``."""

    def read(value: Any) -> float:
        result = _as_float(value)
        if not math.isfinite(result) or result <= above:
            raise ValueError
        return result

    return Rule(f"a finite number greater than {above:g}", read)


def at_least(least: float) -> Rule:
    """A finite number of at least ``least``."""

    def read(value: Any) -> float:
        result = _as_float(value)
        if not math.isfinite(result) or result < least:
            raise ValueError
        return result

    return Rule(f"a finite number of at least {least:g}", read)


def numbers(above: float) -> Rule:
    """A list of finite numbers greater than ``above``; an empty one too."""
    one = number(above)

    def read(value: Any) -> list[float]:
        if not isinstance(value, list):
            raise ValueError
        return [one.read(item) for item in value]

    return Rule(f"a list of finite numbers greater than {above:g}, such as [0.1,1.0]", read)


def norm_order() -> Rule:
    """1, 2 or inf; a file may write infinity as the words ``inf`` and ``.inf``."""

    def read(value: Any) -> float:
        # Plain ``inf`` in a YAML file is text, on the command line a number.
        result = math.inf if value == "inf" else _as_float(value)
        if result not in (1.0, 2.0, math.inf):
            raise ValueError
        return result

    return Rule("1, 2 or inf", read)


def switch() -> Rule:
    """True or false."""

    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Rule("true or false", read)


def text() -> Rule:
    """Text that is not empty."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError
        return value

    return Rule("text", read)


def texts() -> Rule:
    """A list of texts."""
    one = text()

    def read(value: Any) -> list[str]:
        if not isinstance(value, list):
            raise ValueError
        return [one.read(item) for item in value]

    return Rule("a list of texts, such as [a,b]", read)


def names_of(*names: str) -> Rule:
    """A list of some of ``names``, one at least."""
    one = one_of(*names)

    def read(value: Any) -> list[str]:
        if not isinstance(value, list) or not value:
            raise ValueError
        return [one.read(item) for item in value]

    return Rule(f"a list of some of {', '.join(names)}, such as [{names[0]}]", read)


def output_dims() -> Rule:
    """Patterns of parameter names, each with one dimension or a list of dimensions."""

    def read(value: Any) -> dict[str, int | list[int]]:
        if not isinstance(value, dict) or not value:
            raise ValueError
        for pattern, dims in value.items():
            listed = dims if isinstance(dims, list) else [dims]
            if not isinstance(pattern, str) or len(set(map(str, listed))) < len(listed):
                raise ValueError
            if wrong := [dim for dim in listed if type(dim) is not int]:
                raise Refusal(
                    f"{pattern}: {wrong[0]!r} is no dimension; give the number of the dimension "
                    "that indexes outputs, or a list such as [0,1]"
                )
        return value

    return Rule(
        "patterns of parameters with the dimension, or the list of dimensions, that indexes their "
        "outputs, such as {*.c_attn.weight:1,experts.*:[0,1]}",
        read,
    )


def folder_name() -> Rule:
    """The name of one folder."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][\w.\-]{0,99}", value):
            raise ValueError
        return value

    return Rule(
        "the name of a folder: letters, digits, '_', '-' and '.', the first a letter or a digit, "
        "at most 100 of them",
        read,
    )


def dotted_name() -> Rule:
    """Where an object is imported from, as ``_target_`` says it."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or "." not in value:
            raise ValueError
        if not all(part.isidentifier() for part in value.split(".")):
            raise ValueError
        return value

    return Rule("the full name of a class or function, such as torch.optim.SGD", read)


def one_of(*names: str) -> Rule:
    """One of ``names``."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Rule(f"one of {', '.join(names)}", read, names)


def option_of(group: str) -> Rule:
    """The name of an option of ``group``: each file in its folder is one."""
    return one_of(*options(group))


def duration() -> Rule:
    """A duration such as ``3ep``."""
    return Rule(FORM, Duration.parse)


def either(first: Rule, second: Rule) -> Rule:
    """What ``first`` or ``second`` allows."""

    def read(value: Any) -> Any:
        try:
            return first.read(value)
        except ValueError:
            return second.read(value)

    return Rule(f"{first.text}, or {second.text}", read, first.names + second.names)


def optional(rule: Rule, where: str = "") -> Rule:
    """What ``rule`` allows, or null; ``where`` says when null is the right thing."""

    def read(value: Any) -> Any:
        return None if value is None else rule.read(value)

    return Rule(f"{rule.text}, or null{where}", read, rule.names)


def _as_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    try:
        return float(value)
    except OverflowError:
        raise ValueError from None
