"""Which words a composition failed on: every one of them, where Hydra names the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from runner.compose.overrides import plain_word
from runner.config.check import keys_of, leaves, unknown_key
from runner.config.nearest import nearest_name
from runner.config.problem import NOTHING, Problem

Compose = Callable[[Sequence[str]], DictConfig]
Attempt = Callable[[Sequence[str]], DictConfig | None]

# Sections that hand any key on to their target.
_OPEN = ("model", "data", "optimizer", "scheduler")

# Options that another package brings.
_EXTRAS = {("hydra/sweeper", "optuna"): "pip install 'clip-runner[optuna]'"}


@dataclass
class Diagnosis:
    """What was found among the words of one job.

    Attributes:
        problems: one for each wrong word.
        good: the words that compose.
        unsettled: groups whose choice was wrong, so that nobody knows what was meant.
    """

    problems: list[Problem] = field(default_factory=list)
    good: list[str] = field(default_factory=list)
    unsettled: set[str] = field(default_factory=set)


def examine(
    overrides: Sequence[Override], attempt: Attempt, compose: Compose, loader: ConfigLoader
) -> Diagnosis:
    """Try the words that choose options, then those that give values, then each by itself.

    Args:
        overrides: the words of one job; none lists values.
        attempt: the configuration that words give, or None where they do not compose.
        compose: the same, but raises what is wrong.
        loader: knows the groups and their options.
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
            continue  # the keys depend on an option that nobody chose
        problem = _wrong_value(override, base) if base is not None else None
        if problem is None:
            found.good.append(plain_word(override))
        else:
            found.problems.append(problem)
    # Where not even no words compose, a file is to blame and none of the words.
    if attempt(found.good) is None and attempt([]) is not None:
        _try_each(found, compose)
    return found


def misuses_group(overrides: Sequence[Override], loader: ConfigLoader) -> bool:
    """Whether a word takes a group away or chooses two options of it, which Hydra allows."""
    return any(
        (override.is_delete() or isinstance(override.value(), list)) and _chooses(override, loader)
        for override in overrides
    )


def reason(error: BaseException) -> str:
    """What Hydra says, on one line, without its advice to add ``+``: that would hide a slip."""
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
    """Whether a word is about the option of a group."""
    key = override.key_or_group
    return bool(loader.get_group_options(key)) and not isinstance(override.value(), dict)


def wrong_choice(override: Override, loader: ConfigLoader) -> Problem | None:
    """The problem of a word about the option of a group; None also where it is about no group."""
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
    """Keep the words that compose beside those before them; the others are problems."""
    words, found.good = found.good, []
    for word in words:
        try:
            compose([*found.good, word])
        except Exception as error:  # Hydra and OmegaConf raise ValueError, AssertionError and more
            found.problems.append(Problem(word, NOTHING, reason(error)))
        else:
            found.good.append(word)
