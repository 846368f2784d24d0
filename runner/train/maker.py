"""The classes and functions that a configuration names by ``_target_``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from runner.config.problem import (
    MISSING,
    Problem,
    Suggesting,
    did_you_mean,
    near_name,
    unknown_key,
)
from runner.config.section import Target

T = TypeVar("T")


class TargetError(Suggesting, ValueError):
    """A ``_target_`` that does not exist, or that rejects its arguments."""


def maker(target: Target) -> partial[Any]:
    """Return the class or function that ``target`` names, with its arguments bound.

    Raises:
        TargetError: it does not exist, or cannot be imported.
    """
    arguments = {  # without arguments whose class is null, as ``eval`` of data=own
        name: value
        for name, value in target.mapping().items()
        if not isinstance(value, Mapping) or value.get("_target_", name) is not None
    }
    try:
        make = instantiate(arguments, _partial_=True, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        reason = _missing_module(error) or " ".join(str(cause).split()) or type(cause).__name__
        suggestion = ""
        module, _, name = target.target.rpartition(".")
        with suppress(ImportError):
            names = vars(import_module(module))
            if name not in names:
                reason = f"{module} has no {name}{did_you_mean(name, names)}"
                suggestion = near_name(name, names)
                if name == "py":
                    reason = f"name a class or a function of the file: {module}.NAME"
        raise TargetError(f"{target.target}: {reason}", suggestion) from error
    assert isinstance(make, partial)
    return make


def _missing_module(error: BaseException) -> str:
    """Return that a module is not installed, and what to do; empty for another error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__ or cause.__context__
    if cause is None or cause.name is None or "." in cause.name:
        return ""
    return f"{cause}: install {cause.name}, or run the command in the folder of {cause.name}.py"


def takes(make: partial[Any], argument: str) -> bool:
    """Return whether ``make`` can be given ``argument``, which the configuration did not."""
    try:
        return argument in inspect.signature(make.func).parameters.keys() - make.keywords.keys()
    except ValueError:  # the signature of a compiled function may be unknown
        return False


def required(kind: type[T], result: Any, target: Target) -> T:
    """Return what a target has made; a TargetError says that it is of another class."""
    if not isinstance(result, kind):
        returned = type(result).__name__
        raise TargetError(f"{target.target} returned {returned}, no {kind.__name__}")
    return result


def misfits(section: str, target: Target) -> Iterator[Problem]:
    """Yield the arguments that a target does not have, and of model and data those it needs."""
    try:
        taken = inspect.signature(maker(target).func).parameters
    except (TypeError, ValueError):  # a compiled function may have none
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    if not takes_any:
        existing = [f"{section}.{name}" for name in taken]
        for name in target.arguments.keys() - taken.keys():
            yield unknown_key(f"{section}.{name}", existing, target.arguments[name])
    if section not in ("model", "data"):
        return
    for name, parameter in taken.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and name not in target.arguments:
            yield Problem(f"{section}.{name}", MISSING, f"no value given: {target.target} needs it")


def require_plain_step(target: Target, stepped: Any) -> None:
    """Refuse an optimizer or a schedule whose ``step`` needs an argument."""
    for name, parameter in inspect.signature(stepped.step).parameters.items():
        needed = parameter.default is parameter.empty
        if needed and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            raise TargetError(f"{target.target} cannot be used: its step asks for {name}")
