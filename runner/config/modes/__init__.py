"""Descriptions of the clipping modes: their options and facts, without torch.

Each module of this folder describes the mode of its name, which :mod:`runner.clip` implements in a
module of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from inspect import get_annotations, isabstract
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from runner.config.modes.mode import Mode, ModeInfo
from runner.config.problem import nearest_name

__all__ = ["NAMES", "Mode", "ModeError", "ModeInfo", "built_in", "info_of", "load", "options_of"]

NAMES = tuple(
    sorted({file.stem for file in Path(__file__).parent.glob("*.py")} - {"__init__", "mode"})
)
"""Names of the modes that this project brings."""


class ModeError(ValueError):
    """A ``clip._target_`` that is not a clipping mode; the message says what is wrong with it."""


class Option(NamedTuple):
    """An option of a mode: its annotation, and its default (``...`` where it has none)."""

    hint: Any
    default: Any


@cache
def built_in(name: str) -> type[Mode]:
    """Return the description of the mode called ``name``, one of :data:`NAMES`."""
    described: type[Mode] = import_module(f"{__name__}.{name}").MODE
    return described


def info_of(name: str, recorded: Mapping[str, Any] | None = None) -> ModeInfo:
    """Return the facts about a mode, for readers of a run that cannot import a user's mode."""
    if recorded is not None:
        return ModeInfo.of_record(recorded)
    return built_in(name).info if name in NAMES else ModeInfo()


def options_of(mode: type[Mode]) -> dict[str, Option]:
    """Return the options that a mode has besides those of all modes, by name."""
    own = [one for one in fields(mode) if one.init and one.name not in _COMMON]
    hints = get_type_hints(mode, include_extras=True) if own else {}
    return {one.name: Option(hints[one.name], _default(one)) for one in own}


@cache
def load(target: str) -> type[Mode]:
    """Import a user's clipping mode."""
    module, _, name = target.rpartition(".")
    try:
        holder = import_module(module)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{module}.".startswith(f"{absent}."):
            raise ModeError(f"there is no module {absent}: is its folder on PYTHONPATH?") from None
        first = str(error).partition("\n")[0]
        raise ModeError(f"importing {module} raised {type(error).__name__}: {first}") from error
    found = getattr(holder, name, None)
    if found is None:
        near = nearest_name(name, (key for key, one in vars(holder).items() if _is_mode(one)))
        hint = f"; did you mean {module}.{near}?" if near else ""
        raise ModeError(f"{module} has no class {name}{hint}")
    if not _is_mode(found):
        raise ModeError("is no clipping mode: derive the class from runner.clip.ClipMode")
    kind: type[Mode] = found
    if isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ModeError(f"is abstract: the class has to implement {missing}")
    annotated = {key for key, hint in get_annotations(found).items() if "ClassVar" not in str(hint)}
    if undeclared := sorted(annotated - {one.name for one in fields(found)}):
        raise ModeError(f"put @dataclass above the class, so that {undeclared[0]} is an option")
    try:
        options_of(found)
    except Exception as error:
        raise ModeError(f"the types of its options cannot be read: {error}") from error
    return kind


def _is_mode(found: object) -> bool:
    """Return whether an object is a class that implements a mode, not one that describes it."""
    return isinstance(found, type) and issubclass(found, Mode) and hasattr(found, "decide")


def _default(one: Any) -> Any:
    if one.default is not MISSING:
        return one.default
    return ... if one.default_factory is MISSING else one.default_factory()


_COMMON = frozenset(one.name for one in fields(Mode))
