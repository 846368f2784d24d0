"""Check every key of a configuration: by the schema, and by the options of the clipping mode."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from runner.config.mode import Mode, options_of
from runner.config.modes import MODES, class_of
from runner.config.problem import MISSING, Problem, RequestError, leaves, or_list
from runner.config.schema import RunConfig
from runner.config.section import Section, no_value, problems_of


def parse(plain: Mapping[str, Any]) -> RunConfig:
    """Return the typed configuration; a RequestError names everything that is wrong with it."""
    config, problems = examine(plain)
    if config is None:
        raise RequestError(problems)
    return config


def examine(
    plain: Mapping[str, Any], unsettled: Collection[str] = ()
) -> tuple[RunConfig | None, list[Problem]]:
    """Return the typed configuration, or None and what is wrong with ``plain``.

    The option of the sections ``unsettled`` does not exist: their values are not compared with
    each other.
    """
    empty = [name for name, value in leaves("", plain) if value == MISSING]
    config: RunConfig | None = None
    errors: list[ErrorDetails] = []
    try:
        config = RunConfig.model_validate(plain)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    if config is not None and not empty:
        return config, []
    keys = owned_keys(plain)
    judged = [
        error for error in errors if error["type"] != "conflict" or error["loc"][0] not in unsettled
    ]
    problems = []
    for problem in problems_of(judged, keys, plain):
        if problem.key not in keys:
            problem = _with_modes(problem)
        if problem.key not in empty:
            problems.append(problem)
    problems += [Problem(name, MISSING, no_value(name, keys)) for name in dict.fromkeys(empty)]
    return None, problems


def _with_modes(problem: Problem) -> Problem:
    """Name the modes that have a key which does not exist beside the chosen mode."""
    section, _, option = problem.key.partition(".")
    if section != "clip":
        return problem
    modes = [f"clip={name}" for name, mode in MODES.items() if option in options_of(mode)]
    return replace(problem, message=f"is an option of {or_list(modes)}") if modes else problem


def owned_keys(plain: Mapping[str, Any] | None = None) -> Mapping[str, FieldInfo]:
    """Return the keys that this project owns by their dotted names, in the order of the schema.

    The options of the clipping mode in ``plain`` come first.
    """
    kind: type[Mode] = Mode
    clip = (plain or {}).get("clip")
    if isinstance(clip, Mapping):
        with suppress(ValidationError):  # of a mode that does not exist
            kind = class_of(clip)
    options = {f"clip.{name}": field for name, field in options_of(kind).items()}
    return {**options, **_fixed_keys()}


@cache
def _fixed_keys() -> Mapping[str, FieldInfo]:
    def below(section: type[Section], path: str) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in section.model_fields.items():
            key = f"{path}{field.alias or name}"
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from below(kind, f"{key}.")
            else:
                yield key, field

    return dict(below(RunConfig, ""))
