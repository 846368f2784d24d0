"""Say what is wrong with the arguments of a ``_target_``."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from runner.config.problem import Problem, or_list
from runner.config.section import Target
from runner.data import DataUnavailable
from runner.train import build

_KINDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}


def unknown(section: str, target: Target) -> list[Problem]:
    """Return a problem for each argument that ``target`` does not take."""
    known = _parameters(target)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return []
    problems = []
    for name in target.arguments:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        mean = f"; did you mean {near[0]}?" if near else "."
        message = (
            f"{target.target} has no such argument{mean} Remove it with ~{section}.{name}. "
            f"Arguments: {', '.join(known) or 'none'}"
        )
        problems.append(Problem(f"{section}.{name}", target.arguments[name], message))
    return problems


def wrong_kinds(section: str, target: Target) -> list[Problem]:
    """Return a problem for each value that the annotations of ``target`` do not allow."""
    try:
        function = build.maker(target).func
        made_by = getattr(function, "__init__") if isinstance(function, type) else function  # noqa: B009
        hints = get_type_hints(made_by)
    except Exception:  # an annotation may name what is imported for type checking only
        return []
    problems = []
    for name, parameter in _parameters(target).items():
        if name not in target.arguments or name not in hints:
            continue
        value, allowed = target.arguments[name], _allowed(hints[name])
        default = parameter.default
        is_default = type(value) is type(default) and value == default
        if allowed is None or is_default or _allows(allowed, value):
            continue
        text = or_list(_KINDS[one] if isinstance(one, type) else str(one) for one in allowed)
        problems.append(Problem(f"{section}.{name}", value, f"must be {text} ({target.target})"))
    return problems


def refused(section: str, target: Target, error: Exception) -> Problem:
    """Return the problem that ``target`` raised ``error`` instead of taking its arguments."""
    explains = isinstance(error, build.TargetError | DataUnavailable)
    message = str(error) if explains else f"refused its arguments: {first_line(error)}"
    return Problem(f"{section}._target_", target.target, message)


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _parameters(target: Target) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of ``target``; ``**any`` if they cannot be read."""
    try:
        return inspect.signature(build.maker(target).func).parameters
    except ValueError:
        return {"any": inspect.Parameter("any", inspect.Parameter.VAR_KEYWORD)}


def _allowed(hint: Any) -> tuple[Any, ...] | None:
    """Return the plain types and literals that an annotation allows; None if it allows others."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        # A configuration cannot give a tensor.
        parts = [_allowed(one) for one in get_args(hint) if one is not Tensor]
        known = [part for part in parts if part is not None]
        return tuple(one for part in known for one in part) if len(known) == len(parts) else None
    if kind is Literal:
        return get_args(hint)
    if kind in (list, tuple, Sequence):
        return (list,)
    if kind in (dict, Mapping):
        return (dict,)
    return (kind,) if isinstance(kind, type) and kind in _KINDS else None


def _allows(allowed: Sequence[Any], value: Any) -> bool:
    if isinstance(value, dict):  # it may describe an object of any class
        return True
    if isinstance(value, float) and math.isnan(value):
        return False
    kinds = (int, float) if type(value) is int else (type(value),)
    return any(one in kinds if isinstance(one, type) else one == value for one in allowed)
