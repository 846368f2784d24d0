"""What an argument of a ``_target_`` may be, judged by the value that its file of ``conf/`` has.

The files of ``conf/`` show a usual value for every argument of the targets they name. A text where
the file has a number, or a negative number where it has none, is a mistake that the target itself
would answer late, under another name, or not at all. A target that no file names is judged by its
own signature once torch is imported (`runner.train.refused`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from runner.config.folders import find
from runner.config.problem import shown


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


def misfit(example: Any, value: Any) -> str | None:
    """Return what is allowed instead of ``value``, to follow "must be"; None if it fits.

    A number that is not negative stands for one that cannot be: a width, a count, a rate, a share.

    Args:
        example: usual value of the argument.
        value: the given one.
    """
    match example:
        case bool():
            return None if isinstance(value, bool) else "true or false"
        case int() if example >= 0:
            return None if type(value) is int and value >= 0 else "an integer of at least 0"
        case float() if example >= 0:
            fits = type(value) in (int, float) and 0 <= value <= sys.float_info.max
            return None if fits else "a finite number of at least 0"
        case str():
            return None if isinstance(value, str) and value.strip() else "text"
        case [first, *_] if text := misfit(first, None):
            fits = isinstance(value, list) and all(misfit(first, one) is None for one in value)
            return None if fits else f"a list such as {shown(example)}, each {text}"
    return None


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
