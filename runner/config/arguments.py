"""What an argument of a ``_target_`` may be, judged by the value that its file of ``conf/`` has.

The files of ``conf/`` show a usual value for every argument of the targets they name. A text where
the file has a number, or a negative number where it has none, is a mistake that the target itself
would answer late, under another name, or not at all. A target that no file names is judged by its
own signature once torch is imported (`runner.train.refused`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import yaml

from runner.config.folders import find
from runner.config.problem import shown
from runner.config.rules import Rule, at_least, integer, switch, text


@cache
def usual(group: str, target: str) -> Mapping[str, Any]:
    """Return the arguments that the files of ``conf/<group>/`` give to ``target``.

    Returns:
        Empty where no file names the target. References (``${seed}``) are left out.
    """
    found: dict[str, Any] = {}
    for file in sorted((find("conf") / group).glob("*.yaml"), reverse=True):
        content = file.read_text(encoding="utf-8")
        if f"_target_: {target}\n" in content:
            found |= {key: _plain(value) for key, value in yaml.safe_load(content).items()}
    return {key: value for key, value in found.items() if not _refers(value)}


def rule_like(example: Any) -> Rule | None:
    """Return the rule for values of the kind of ``example``, or None where any value may do.

    An example that is not negative stands for a number that cannot be negative: a width, a count,
    a rate, a share.
    """
    match example:
        case bool():
            return switch()
        case int() if example >= 0:
            return integer(0)
        case float() if example >= 0:
            return at_least(0)
        case str():
            return text()
        case [first, *_] if (one := rule_like(first)) is not None:
            return Rule(f"a list such as {shown(example)}, each {one.text}", _reads_each(one))
    return None


def _reads_each(one: Rule) -> Callable[[Any], list[Any]]:
    def read(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError
        return [one.read(item) for item in value]

    return read


def _plain(value: Any) -> Any:
    """Read numbers such as 1e-3, which YAML 1.1 takes for text, as Hydra does."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _refers(value: Any) -> bool:
    return isinstance(value, str) and "${" in value
