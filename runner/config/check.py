"""The check of a composed configuration, and the typed result.

It imports neither Hydra nor torch, so that any process can afford it: each run of a sweep calls
`parse` again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import ValidationError, create_model
from pydantic_core import ErrorDetails

from runner.config.arguments import misfit, usual
from runner.config.clip_section import (
    Clip,
    choices_with,
    clip_section,
    every_option,
    lenient_clip_section,
)
from runner.config.modes import ModeError
from runner.config.problem import MISSING, NOTHING, Problem, RequestError, did_you_mean, unknown_key
from runner.config.schema import RunConfig
from runner.config.section import Section, Target, section_of
from runner.config.values import Allowed, Refusal, allowed


class Key(NamedTuple):
    """One key that this project owns."""

    name: str  # dotted
    allowed: Allowed
    meaning: str
    default: Any = MISSING  # that of an option of a user's clipping mode; files have all others


def parse(plain: Mapping[str, Any]) -> RunConfig:
    """Return the typed configuration that ``plain`` describes."""
    config, problems = examine(plain)
    if config is None:
        raise RequestError(problems)
    return config


def examine(
    plain: Mapping[str, Any], unsettled: Collection[str] = ()
) -> tuple[RunConfig | None, list[Problem]]:
    """Return the typed configuration, or None and what is wrong with ``plain``."""
    problems = [*_problems_of_target(plain), *_problems_of_arguments(plain)]
    schema = _schema(plain)
    fields = schema.model_fields
    try:
        checked: dict[str, Any] = dict(schema.model_validate(plain))
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems += (problem for one in found for problem in _problems(one, plain))
        wrong = {one["loc"][0] for one in found}
        right = {name: section_of(field) for name, field in fields.items() if name not in wrong}
        checked = {name: cls.model_validate(plain[name]) for name, cls in right.items() if cls}
    for name, section in checked.items():
        if isinstance(section, Section) and name not in unsettled:
            problems += _conflicts(section, name, plain)
    config = None
    if not problems:
        # A class that was made for one mode could not travel to another process.
        config = RunConfig.model_construct(**checked)
        problems += () if unsettled else _conflicts(config, "", plain)
    if problems:
        config = None
        # An error for each alternative of a type, or each item of a list, is one problem.
        problems = list({problem.key: problem for problem in problems}.values())
        order = {name: number for number, name in enumerate(fields)}
        problems.sort(key=lambda problem: order.get(problem.key.partition(".")[0], len(order)))
    return config, problems


def owned_keys(plain: Mapping[str, Any] | None = None) -> Mapping[str, Key]:
    """Return the keys that this project owns by their dotted names, in the order of the schema."""
    return _keys(_schema_with(every_option()) if plain is None else _schema(plain))


@cache
def _keys(schema: type[RunConfig]) -> Mapping[str, Key]:
    return {key.name: key for key in _owned(schema, "")}


def keys_of(plain: Mapping[str, Any]) -> set[str]:
    """Return every dotted key that exists: the owned ones and those of the targets in ``plain``."""
    mine = {*owned_keys(), *owned_keys(plain)}
    return mine | {key for key, _ in leaves("", plain) if key}


def _schema(plain: Mapping[str, Any]) -> type[RunConfig]:
    """Return the model of a configuration with the options of its clipping mode."""
    return _schema_with(lenient_clip_section(plain.get("clip")))


@cache
def _schema_with(section: type[Clip]) -> type[RunConfig]:
    return create_model("RunConfig", __base__=RunConfig, clip=(section, ...))


def _conflicts(section: Section, path: str, plain: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the values of a section that are right one by one, but exclude each other."""
    for conflict in section.conflicts():
        key = f"{path}.{conflict.key}".lstrip(".")
        value = _value(plain, key.split(".")) if conflict.value is NOTHING else conflict.value
        yield Problem(key, value, conflict.message)


def _problems(error: ErrorDetails, plain: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems that one error of pydantic stands for."""
    place = [*error["loc"]]
    cause = error.get("ctx", {}).get("error")
    if error["type"] in ("extra_forbidden", "invalid_key"):
        # The keys of other targets are no help for a section of ours.
        own = _value(plain, ("clip", "_target_")) != MISSING
        known = {*owned_keys(plain if own else None)}
        for leaf, content in leaves(_dotted(place), _value(plain, place)):
            yield unknown_key(leaf, known, content, choices_with(leaf))
    elif section := _section_at(place):
        names = (field.alias or name for name, field in section.model_fields.items())
        message = f"must be a section with the keys {', '.join(names)}"
        yield Problem(_dotted(place), _value(plain, place, None), message)
    else:
        owned = owned_keys(plain)
        paths = (_dotted(place[:end]) for end in range(1, len(place) + 1))
        key = next(owned[path] for path in paths if path in owned)
        value = _value(plain, key.name.split("."))
        if value == MISSING and error["type"] != "missing":
            value = error["input"]  # A short form gives the value to the section.
        if value == MISSING:
            message = f"no value given; must be {key.allowed.text} ({key.meaning})"
        elif isinstance(cause, Refusal):
            message = str(cause)
        else:
            message = f"must be {key.allowed.text}{did_you_mean(value, key.allowed.names)}"
        yield Problem(key.name, value, message)


def _problems_of_target(plain: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield why the user's clipping mode cannot be used, if there is one and it cannot."""
    try:
        clip_section(plain.get("clip"))
    except ModeError as error:
        yield Problem("clip._target_", _value(plain, ("clip", "_target_")), str(error))


def _problems_of_arguments(plain: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the arguments of targets that are missing, or unlike those of their file."""
    for name, field in RunConfig.model_fields.items():
        section, node = section_of(field), plain.get(name)
        if section is None or not issubclass(section, Target) or not isinstance(node, Mapping):
            continue
        own = {one.alias or key for key, one in section.model_fields.items()}
        target = node.get("_target_")
        examples = usual(name, target) if isinstance(target, str) else {}
        for key, value in node.items():
            if key in own:
                continue
            missing = [leaf for leaf, one in leaves(f"{name}.{key}", value) if one == MISSING]
            for leaf in missing:
                yield Problem(leaf, MISSING, "no value given")
            if not missing and (text := misfit(examples.get(key), value)):
                yield Problem(f"{name}.{key}", value, f"must be {text}")


def _dotted(keys: Iterable[Any]) -> str:
    return ".".join(str(key) for key in keys)


def _section_at(place: Iterable[Any]) -> type[Section] | None:
    """Return the model of the section at a path of keys; None if there is no section."""
    section: type[Section] | None = RunConfig
    for key in place:
        fields = {} if section is None else section.model_fields
        section = section_of(fields[key]) if key in fields else None
    return section


def _value(plain: Mapping[str, Any], keys: Iterable[Any], missing: Any = MISSING) -> Any:
    """Return the value of a key; ``missing`` where there is none."""
    node: Any = plain
    for key in keys:
        node = node.get(key, missing) if isinstance(node, Mapping) else missing
    return node


def _owned(cls: type[Section], path: str) -> Iterator[Key]:
    for name, field in cls.model_fields.items():
        where = f"{path}{field.alias or name}"
        if section := section_of(field):
            yield from _owned(section, f"{where}.")
        else:
            default = MISSING if field.is_required() else field.get_default()
            meaning = field.description or ""
            yield Key(where, allowed(field.annotation, field.metadata), meaning, default)


def leaves(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key at and below ``path`` with its value; a list is one value."""
    if not isinstance(node, Mapping) or not node:
        yield path, node
        return
    for key, value in node.items():
        yield from leaves(f"{path}.{key}" if path else str(key), value)
