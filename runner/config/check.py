"""The check of a composed configuration, and the typed result.

It imports neither Hydra nor torch, so that any process can afford it: each run of a sweep calls
`parse` again.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from runner.config.clip_section import clip_section, modes_with
from runner.config.folders import find, read_yaml
from runner.config.problem import (
    MISSING,
    NOTHING,
    Problem,
    RequestError,
    leaves,
    or_list,
    shown,
    unknown_key,
)
from runner.config.schema import RunConfig
from runner.config.section import CONFIG, Section, Target, section_of, sentences


class Key(NamedTuple):
    """One key that this project owns."""

    name: str  # dotted
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
    """Return the typed configuration, or None and what is wrong with ``plain``.

    Values of the sections ``unsettled``, whose option does not exist, are judged one by one alone.
    """
    clip, refused = clip_section(plain.get("clip"))
    known, problems = [*owned_keys(plain)], []
    if refused:
        problems.append(Problem("clip._target_", plain["clip"]["_target_"], refused))
    checked: dict[str, Any] = {}
    for name, field in RunConfig.model_fields.items():
        section = clip if name == "clip" else section_of(field)
        if name not in plain and not field.is_required():
            checked[name] = field.get_default()
        elif plain.get(name, MISSING) == MISSING:
            problems.append(Problem(name, MISSING, f"no value given ({field.description})"))
        else:
            if section is not None and issubclass(section, Target):
                problems += _problems_of_arguments(section, name, plain[name])
            try:
                checked[name] = _validator(section or name).validate_python(plain[name])
            except ValidationError as error:
                problems += _problems(error, name, section, plain, known)
    for name, content in plain.items():
        if name not in RunConfig.model_fields:
            every = {*known, *(key for key, _ in leaves("", plain))}
            problems += (unknown_key(key, every, value) for key, value in leaves(name, content))
    for name, one in checked.items():
        if isinstance(one, Section) and name not in unsettled:
            problems += _conflicts(one, name, plain)
    config = None
    if not problems:
        # A class that was made for one mode could not travel to another process.
        config = RunConfig.model_construct(**checked)
        problems += () if unsettled else _conflicts(config, "", plain)
    return (None if problems else config), list({one.key: one for one in problems}.values())


@cache
def _validator(kind: type[Section] | str) -> TypeAdapter[Any]:
    """Return what reads a section, or the value of a key beside the sections."""
    if not isinstance(kind, str):
        return TypeAdapter(kind)
    field = RunConfig.model_fields[kind]
    hint: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return TypeAdapter(hint, config=CONFIG)


def _problems(
    error: ValidationError,
    name: str,
    section: type[Section] | None,
    plain: Mapping[str, Any],
    known: list[str],
) -> Iterator[Problem]:
    """Yield the problems of a section, or of a key beside the sections."""
    for one in error.errors(include_url=False):
        if one["type"] in ("extra_forbidden", "invalid_key"):
            place = ".".join(map(str, (name, *one["loc"])))
            for key, value in leaves(place, one["input"]):
                option = key.split(".")[1]
                if name == "clip" and (modes := modes_with(option)):
                    text = f"is an option of {or_list(f'clip={mode}' for mode in modes)}"
                    yield Problem(key, value, text)
                else:
                    yield unknown_key(key, known, value)
    meanings = owned_keys(plain)
    for inner, text in sentences(error, section).items():
        key = f"{name}.{inner}" if section and inner else name
        value = _value(plain, key)
        about = f" ({meanings[key].meaning})" if value == MISSING and key in meanings else ""
        yield Problem(key, value, text + about)


def _conflicts(section: Section, path: str, plain: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the values of a section that are right one by one, but exclude each other."""
    for conflict in section.conflicts():
        key = f"{path}.{conflict.key}".lstrip(".")
        yield Problem(
            key,
            _value(plain, key) if conflict.value is NOTHING else conflict.value,
            conflict.message,
        )


def _problems_of_arguments(section: type[Section], name: str, node: Any) -> Iterator[Problem]:
    """Yield the arguments of a target that are missing, or unlike those of its file."""
    if not isinstance(node, Mapping):
        return
    own = {field.alias or key for key, field in section.model_fields.items()}
    examples = usual(name, str(node.get("_target_")))
    for key, value in node.items():
        if key in own:
            continue
        missing = [leaf for leaf, one in leaves(f"{name}.{key}", value) if one == MISSING]
        yield from (Problem(leaf, MISSING, "no value given") for leaf in missing)
        if not missing and (text := misfit(examples.get(key), value)):
            yield Problem(f"{name}.{key}", value, f"must be {text}")


@cache
def usual(group: str, target: str) -> Mapping[str, Any]:
    """Return the arguments that the files of ``conf/<group>/`` give to ``target``."""
    found: dict[str, Any] = {}
    for file in sorted((find("conf") / group).glob("*.yaml"), reverse=True):
        if f"_target_: {target}\n" in file.read_text(encoding="utf-8"):
            found |= read_yaml(file)
    return {key: value for key, value in found.items() if "${" not in str(value)}


def misfit(example: Any, value: Any) -> str | None:
    """Return what is allowed instead of ``value``, given the usual value; None if it fits.

    A text where the file has a number, or a negative number where the file has another, is a
    mistake that the target itself would report late, or not at all.
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


def owned_keys(plain: Mapping[str, Any] | None = None) -> Mapping[str, Key]:
    """Return the keys that this project owns by their dotted names, in the order of the schema."""
    return _owned(clip_section((plain or {}).get("clip"))[0])


@cache
def _owned(clip: type[Section]) -> Mapping[str, Key]:
    def below(section: type[Section], path: str) -> Iterator[Key]:
        for name, field in section.model_fields.items():
            inner = clip if path + name == "clip" else section_of(field)
            key = f"{path}{field.alias or name}"
            if inner is not None:
                yield from below(inner, f"{key}.")
            else:
                default = MISSING if field.is_required() else field.get_default()
                yield Key(key, field.description or "", default)

    return {key.name: key for key in below(RunConfig, "")}


def _value(plain: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key; MISSING where there is none."""
    node: Any = plain
    for part in key.split("."):
        node = node.get(part, MISSING) if isinstance(node, Mapping) else MISSING
    return node
