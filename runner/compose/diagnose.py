"""Find every override that a composition fails on; Hydra names only the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from runner.compose.overrides import plain_word
from runner.config.check import keys_of, leaves, unknown_key
from runner.config.problem import NOTHING, Problem, nearest_name

Compose = Callable[[Sequence[str]], DictConfig]
Attempt = Callable[[Sequence[str]], DictConfig | None]

# Sections that pass any key to their target.
_OPEN = ("model", "data", "optimizer", "scheduler")

# Options of other packages.
_EXTRAS = {("hydra/sweeper", "optuna"): "pip install 'clip-runner[optuna]'"}


@dataclass
class Diagnosis:
    """Wrong and right overrides of one job.

    Attributes:
        problems: a problem for each wrong override.
        good: overrides that compose.
        unsettled: groups whose chosen option does not exist.
    """

    problems: list[Problem] = field(default_factory=list)
    good: list[str] = field(default_factory=list)
    unsettled: set[str] = field(default_factory=set)


def examine(
    overrides: Sequence[Override], attempt: Attempt, compose: Compose, loader: ConfigLoader
) -> Diagnosis:
    """Check overrides that choose options, then those that give values, then each one alone.

    Args:
        overrides: overrides of one job, without lists of values.
        attempt: composes overrides; returns None if that fails.
        compose: composes overrides; raises if that fails.
        loader: Hydra's loader, which lists groups and their options.
    """
    found = Diagnosis()
    values = []
    for override in overrides:
        if not _chooses(override, loader):
            values.append(override)
        elif problem := wrong_choice(override, loader):
            found.problems.append(problem)
            found.unsettled.add(override.key_or_group)
        else:
            found.good.append(plain_word(override))
    composed = attempt(found.good)
    base = None if composed is None else _content(composed)
    for override in values:
        section = override.key_or_group.partition(".")[0]
        if section in found.unsettled and section in _OPEN:
            continue  # its keys depend on an option that does not exist
        problem = _wrong_value(override, base) if base is not None else None
        if problem is None:
            found.good.append(plain_word(override))
        else:
            found.problems.append(problem)
    # If not even an empty list of overrides composes, a file is at fault.
    if attempt(found.good) is None and attempt([]) is not None:
        _try_each(found, compose)
    return found


def misuses_group(overrides: Sequence[Override], loader: ConfigLoader) -> bool:
    """Return whether an override removes a group or chooses two options, which Hydra allows."""
    return any(
        (override.is_delete() or isinstance(override.value(), list)) and _chooses(override, loader)
        for override in overrides
    )


def reason(error: BaseException) -> str:
    """Return Hydra's message on one line, without its advice to add ``+``, which hides typos."""
    texts = [str(error), str(error.__cause__ or "")]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    kept = [
        line
        for line in lines
        if line
        and "append to your" not in line
        and not line.startswith(("full_key", "object_type"))
    ]
    return " ".join(kept[:3]) or type(error).__name__


def _content(config: DictConfig) -> dict[str, Any]:
    content = OmegaConf.to_container(config)
    assert isinstance(content, dict)
    return {str(key): content[key] for key in content}


def _chooses(override: Override, loader: ConfigLoader) -> bool:
    """Return whether an override chooses an option of a group."""
    key = override.key_or_group
    return bool(loader.get_group_options(key)) and not isinstance(override.value(), dict)


def wrong_choice(override: Override, loader: ConfigLoader) -> Problem | None:
    """Return the problem of an override that chooses an option; None if it is right, or another."""
    if not _chooses(override, loader):
        return None
    group = override.key_or_group
    value: Any = override.value()
    options = loader.get_group_options(group)
    allowed = f"(options of {group}: {', '.join(options)})"
    if override.is_delete():
        return Problem(f"~{group}", NOTHING, f"a run needs this choice  {allowed}")
    if override.is_add() or override.is_force_add():
        return Problem(
            override.get_key_element(), value, f"is chosen already; leave out the +  {allowed}"
        )
    if override.package is not None:
        return Problem(override.get_key_element(), value, f"must be {group}=OPTION  {allowed}")
    if isinstance(value, str) and value in options:
        return None
    if isinstance(value, str) and (group, value) in _EXTRAS:
        return Problem(group, value, f"needs {_EXTRAS[group, value]}  {allowed}")
    near = nearest_name(value, options) if isinstance(value, str) else None
    hint = f"; did you mean {near}?" if near else ""
    return Problem(group, value, f"unknown option{hint}  {allowed}")


def _wrong_value(override: Override, base: dict[str, Any]) -> Problem | None:
    key: str = override.key_or_group
    value = NOTHING if override.is_delete() else override.value()
    exists, content = _look_up(base, key)
    if override.is_delete() or not (override.is_add() or override.is_force_add()):
        if not exists:
            return _unknown(override, key, value, base)
        if isinstance(content, dict):  # clip={threshold:0.1}
            for leaf, leaf_value in leaves(key, value):
                if not _look_up(base, leaf)[0]:
                    return _unknown(override, leaf, leaf_value, base)
        return None
    if override.is_add() and exists and content is not None and not isinstance(value, dict | list):
        return Problem(override.get_key_element(), value, f"exists already; write {key}=VALUE")
    return None


def _unknown(override: Override, key: str, value: Any, base: dict[str, Any]) -> Problem:
    if override.is_hydra_override():
        return Problem(key, value, "Hydra has no such key; --cfg hydra prints those it has")
    ours = {name: base[name] for name in base if name != "hydra"}
    problem = unknown_key(key, keys_of(ours), value)
    section, _, rest = key.partition(".")
    if section in _OPEN and rest:
        advice = f"; a further argument of its _target_ is +{key}=VALUE"
        return Problem(key, value, problem.message + advice)
    return problem


def _look_up(node: Any, key: str) -> tuple[bool, Any]:
    """Whether a dotted key exists in plain containers, and what it holds."""
    for part in key.replace("[", ".").replace("]", "").split("."):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return False, None
    return True, node


def _try_each(found: Diagnosis, compose: Compose) -> None:
    """Keep overrides that compose with those before them; report the others."""
    words, found.good = found.good, []
    for word in words:
        try:
            compose([*found.good, word])
        except Exception as error:  # Hydra and OmegaConf raise ValueError, AssertionError and more
            found.problems.append(Problem(word, NOTHING, reason(error)))
        else:
            found.good.append(word)
