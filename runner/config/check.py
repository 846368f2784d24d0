"""The check of a composed configuration, and the typed result."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import ValidationError

from runner.config import problem
from runner.config.clip_section import clip_model
from runner.config.modes import MODES, options_of
from runner.config.problem import MISSING, NOTHING, Problem, RequestError, leaves
from runner.config.schema import RunConfig
from runner.config.section import Conflict, Keys, conflicts_of


class Key(NamedTuple):
    name: str  # dotted
    meaning: str
    default: Any = MISSING  # that of an option of a user's clipping mode; files have all others


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

    Values of the sections ``unsettled``, whose option does not exist, are judged one by one alone.
    """
    known, problems = owned_keys(plain), []
    try:
        config = RunConfig.model_validate(plain)
        found = [] if unsettled else list(config.conflicts())
        return (None if found else config), [_problem(one, plain, known) for one in found]
    except ValidationError as error:
        errors = error.errors(include_url=False)
    for one in errors:
        if one["type"] in ("extra_forbidden", "invalid_key"):
            for name, value in leaves(".".join(map(str, one["loc"])), one["input"]):
                every = known if "." in name else {*known, *(key for key, _ in leaves("", plain))}
                problems.append(_unknown(name, value, every))
    kept = (one for one in errors if not (one["type"] == "conflict" and one["loc"][0] in unsettled))
    return None, problems + [_problem(one, plain, known) for one in conflicts_of(kept, known)]


def _unknown(name: str, value: Any, known: Collection[str]) -> Problem:
    section, _, option = name.partition(".")
    option = option.partition(".")[0]
    having = [f"clip={name}" for name, mode in MODES.items() if option in options_of(mode)]
    if section == "clip" and having:
        return Problem(name, value, f"is an option of {problem.or_list(having)}")
    return problem.unknown_key(name, known, value)


def _problem(one: Conflict, plain: Mapping[str, Any], known: Mapping[str, Key]) -> Problem:
    value: Any = plain if one.value is NOTHING else one.value
    for part in one.key.split(".") if one.value is NOTHING else ():
        value = value.get(part, MISSING) if isinstance(value, Mapping) else MISSING
    about = f" ({known[one.key].meaning})" if value == MISSING and one.key in known else ""
    return Problem(one.key, value, one.message + about)


def owned_keys(plain: Mapping[str, Any] | None = None) -> Mapping[str, Key]:
    """Return the keys that this project owns by their dotted names, in the order of the schema."""
    return _owned(clip_model((plain or {}).get("clip")))


@cache
def _owned(clip: type[Keys]) -> Mapping[str, Key]:
    def below(section: type[Keys], path: str) -> Iterator[Key]:
        for name, field in section.model_fields.items():
            inner: Any = clip if path + name == "clip" else field.annotation
            key = f"{path}{field.alias or name}"
            if isinstance(inner, type) and issubclass(inner, Keys):
                yield from below(inner, f"{key}.")
            else:
                default = MISSING if field.is_required() else field.get_default()
                yield Key(key, field.description or "", default)

    return {key.name: key for key in below(RunConfig, "")}
