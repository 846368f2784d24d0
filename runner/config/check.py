"""The check of a composed configuration, and the typed result.

It imports neither Hydra nor torch, so that every rank can afford it: a rank receives the plain dict
and calls `parse` again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from operator import getitem
from typing import Any, NamedTuple, get_args, get_type_hints

from runner.config.arguments import rule_like, usual
from runner.config.nearest import nearest_keys, nearest_name, or_list
from runner.config.problem import MISSING, NOTHING, Problem, RequestError
from runner.config.rules import Refusal, Rule
from runner.config.schema import RunConfig, Target


class Key(NamedTuple):
    """One key that this project owns."""

    name: str  # dotted
    rule: Rule
    meaning: str


def parse(plain: Mapping[str, Any]) -> RunConfig:
    """The typed configuration that ``plain`` describes.

    Args:
        plain: the composed configuration as plain containers, interpolations resolved; ``???``
            stands for a value that is missing.

    Raises:
        RequestError: anything is unknown, missing, of the wrong type, out of range, or cannot stand
            together; it names every such problem.
    """
    config, problems = examine(plain)
    if config is None:
        raise RequestError(problems)
    return config


def examine(
    plain: Mapping[str, Any], unsettled: Collection[str] = ()
) -> tuple[RunConfig | None, list[Problem]]:
    """What `parse` does, with the problems handed back.

    Args:
        plain: as for `parse`.
        unsettled: sections whose option was a wrong word and stands for nothing that was asked for:
            each of their values is checked, but not whether the values can stand together, nor
            with those of other sections.
    """
    check = _Check(unsettled)
    config = check.section(RunConfig, plain, "")
    return config, check.problems


@cache
def owned_keys() -> tuple[Key, ...]:
    """Every key that this project owns, in the order of the schema."""
    return tuple(_owned(RunConfig, ""))


def keys_of(plain: Mapping[str, Any]) -> set[str]:
    """Every dotted key that exists: the owned ones and those of the targets in ``plain``."""
    return {key.name for key in owned_keys()} | {key for key, _ in leaves("", plain) if key}


def unknown_key(key: str, known: Iterable[str], value: Any = NOTHING) -> Problem:
    """The problem of a key that does not exist, with the names that are near."""
    known = set(known)
    message = "unknown key"
    sections = {name.partition(".")[0] for name in known}
    near = nearest_keys(key, known | sections)
    if not near and (section := nearest_name(key.partition(".")[0], sections - {key})):
        near = [section]
    if near:
        message += f"; did you mean {or_list(near)}?"
    section = key.rpartition(".")[0]
    beside = sorted({name[len(section) + 1 :] for name in known if name.startswith(f"{section}.")})
    if section and beside:
        return Problem(key, value, f"{message}  (keys of {section}: {', '.join(beside)})")
    return Problem(key, value, f"{message}  (keys: {', '.join(sorted(sections))})")


class _Check:
    """One walk over a configuration that notes each problem and goes on."""

    def __init__(self, unsettled: Collection[str]) -> None:
        self.unsettled = unsettled
        self.problems: list[Problem] = []

    def section(self, cls: type[Any], node: Any, path: str) -> Any:
        """The section ``cls`` that ``node`` describes, or None where it has a problem."""
        if node == MISSING or not isinstance(node, Mapping):
            names = ", ".join(
                _key(field.name) for field in fields(cls) if field.name != "arguments"
            )
            self._note(path, node, f"must be a section with the keys {names}")
            return None
        before = len(self.problems)
        hints = get_type_hints(cls, include_extras=True)
        is_open = issubclass(cls, Target)
        hints.pop("arguments", None)
        values = {}
        for name, hint in hints.items():
            key = _key(name)
            where = f"{path}.{key}" if path else key
            if is_dataclass(hint):
                values[name] = self.section(_class(hint), node.get(key), where)
            else:
                values[name] = self._value(hint, node.get(key, MISSING), where)
        others = {key: node[key] for key in node if key not in map(_key, hints)}
        if is_open:
            values["arguments"] = others
            self._arguments(others, path, node.get("_target_"))
        else:
            self._unknown(others, path)
        if len(self.problems) > before:
            return None
        made = cls(**values)
        # What several sections say together is settled once each of them is.
        if not (path in self.unsettled if path else self.unsettled):
            for conflict in getattr(made, "conflicts", tuple)():
                where = f"{path}.{conflict.key}" if path else conflict.key
                value = reduce(getitem, conflict.key.split("."), node)
                self._note(where, value, conflict.message)
        return made if len(self.problems) == before else None

    def _value(self, hint: Any, value: Any, path: str) -> Any:
        _, rule, meaning = get_args(hint)
        if value == MISSING:
            return self._note(path, value, f"no value given; must be {rule.text} ({meaning})")
        return self._read(rule, value, path)

    def _read(self, rule: Rule, value: Any, path: str) -> Any:
        try:
            return rule.read(value)
        except Refusal as refusal:
            return self._note(path, value, str(refusal))
        except ValueError:
            near = nearest_name(value, rule.names) if isinstance(value, str) else None
            hint = f"; did you mean {near}?" if near else ""
            return self._note(path, value, f"must be {rule.text}{hint}")

    def _unknown(self, others: Mapping[str, Any], path: str) -> None:
        known = keys_of({})  # the keys of a target are no help for a section of ours
        for key, value in others.items():
            where = f"{path}.{key}" if path else str(key)
            for leaf, content in leaves(where, value):
                self.problems.append(unknown_key(leaf, known, content))

    def _arguments(self, others: Mapping[str, Any], path: str, target: Any) -> None:
        """Note arguments of ``target`` that are missing, or unlike those of its file."""
        examples = usual(path, target) if isinstance(target, str) else {}
        for key, value in others.items():
            missing = [leaf for leaf, one in leaves(f"{path}.{key}", value) if one == MISSING]
            for leaf in missing:
                self._note(leaf, MISSING, "no value given")
            rule = rule_like(examples.get(key))
            if rule is not None and not missing:
                self._read(rule, value, f"{path}.{key}")

    def _note(self, key: str, value: Any, message: str) -> None:
        self.problems.append(Problem(key, value, message))


def _class(hint: Any) -> type[Any]:
    assert isinstance(hint, type)
    return hint


def _key(field_name: str) -> str:
    """The key of a field; the one that Hydra has named itself is spelled its way."""
    return "_target_" if field_name == "target" else field_name


def _owned(cls: type[Any], path: str) -> Iterator[Key]:
    for name, hint in get_type_hints(cls, include_extras=True).items():
        where = f"{path}.{_key(name)}" if path else _key(name)
        if is_dataclass(hint):
            yield from _owned(_class(hint), where)
        elif name != "arguments":
            _, rule, meaning = get_args(hint)
            yield Key(where, rule, meaning)


def leaves(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Each dotted key at and below ``path``, and its value; a list is one value."""
    if not isinstance(node, Mapping) or not node:
        yield path, node
        return
    for key, value in node.items():
        yield from leaves(f"{path}.{key}" if path else str(key), value)
