"""Check an argument of a ``_target_`` against its usual value, the one in the file of ``conf/``.

The files of ``conf/`` give a usual value to every argument of the targets they name. A text where
the file has a number, or a negative number where the file has another, is a mistake that the target
itself would report late, or not at all. A target that no file names is judged by its own signature
once torch is imported (`runner.train.refused`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from runner.config.folders import find
from runner.config.problem import shown


@cache
def usual(group: str, target: str) -> Mapping[str, Any]:
    """Return the arguments that the files of ``conf/<group>/`` give to ``target``."""
    from runner.config.yaml_file import read_yaml  # a rank that checks nothing needs no reader

    found: dict[str, Any] = {}
    for file in sorted((find("conf") / group).glob("*.yaml"), reverse=True):
        if f"_target_: {target}\n" in file.read_text(encoding="utf-8"):
            found |= read_yaml(file)
    return {key: value for key, value in found.items() if "${" not in str(value)}


def misfit(example: Any, value: Any) -> str | None:
    """Return what is allowed instead of ``value``, to follow "must be"; None if it fits."""
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
