"""Find every override that a composition fails on; Hydra names only the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.compose.composer import Composer, plain_word, reason
from runner.compose.launchers import RAY
from runner.config.check import keys_of, leaves
from runner.config.clip_section import choices_with
from runner.config.problem import NOTHING, Problem, did_you_mean, unknown_key

# Sections that pass any key to their target.
_OPEN = ("model", "data", "optimizer", "scheduler", "loss")

# Options of other packages.
_EXTRAS = {
    ("hydra/sweeper", "optuna"): "needs pip install 'clip-runner[optuna]'",
    ("hydra/launcher", "ray"): RAY,
}


@dataclass
class Diagnosis:
    """Wrong and right overrides of one job."""

    problems: list[Problem] = field(default_factory=list)
    good: list[str] = field(default_factory=list)
    unsettled: set[str] = field(default_factory=set)


def examine(overrides: Sequence[Override], composer: Composer) -> Diagnosis:
    """Check overrides that choose options, then those that give values, then each one alone."""
    found = Diagnosis()
    values = []
    for override in overrides:
        if not chooses(override, composer.loader):
            values.append(override)
        elif problem := _wrong_choice(override, composer.loader):
            found.problems.append(problem)
            found.unsettled.add(override.key_or_group)
        else:
            found.good.append(plain_word(override))
    composed = composer.attempt(found.good)
    base: Any = None if composed is None else OmegaConf.to_container(composed)
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
    if composer.attempt(found.good) is None and composer.attempt([]) is not None:
        _try_each(found, composer)
    return found


def refuse(composer: Composer, word: str) -> Problem | None:
    """Return the problem of an override that chooses an option which does not exist."""
    overrides, problems = composer.read([word])
    return problems[0] if problems else _wrong_choice(overrides[0], composer.loader)


def misuses_group(overrides: Sequence[Override], loader: ConfigLoader) -> bool:
    """Return whether an override removes a group or chooses two options, which Hydra allows."""
    return any(
        (override.is_delete() or isinstance(override.value(), list)) and chooses(override, loader)
        for override in overrides
    )


def chooses(override: Override, loader: ConfigLoader) -> bool:
    """Return whether an override chooses an option of a group."""
    key = override.key_or_group
    return bool(loader.get_group_options(key)) and not isinstance(override.value(), dict)


def chooses_option(override: Override, loader: ConfigLoader) -> bool:
    """Return whether an override chooses an option that exists, and nothing else."""
    if override.is_sweep_override():
        return False
    return chooses(override, loader) and _wrong_choice(override, loader) is None


def wrong(override: Override, base: Any, loader: ConfigLoader) -> Problem | None:
    """Return the problem of one override of a configuration; None if it is right."""
    if chooses(override, loader):
        return _wrong_choice(override, loader)
    return _wrong_value(override, base)


def _wrong_choice(override: Override, loader: ConfigLoader) -> Problem | None:
    """Return the problem of a choice of an option; None if it is right, or no choice."""
    if not chooses(override, loader):
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
        return Problem(group, value, f"{_EXTRAS[group, value]}  {allowed}")
    return Problem(group, value, f"unknown option{did_you_mean(value, options)}  {allowed}")


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


def _look_up(node: Any, key: str) -> tuple[bool, Any]:
    """Return whether a dotted key exists in plain containers, and what it holds."""
    for part in key.replace("[", ".").replace("]", "").split("."):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return False, None
    return True, node


def _unknown(override: Override, key: str, value: Any, base: dict[str, Any]) -> Problem:
    if override.is_hydra_override():
        return Problem(key, value, "Hydra has no such key; --cfg hydra prints those it has")
    ours = {name: base[name] for name in base if name != "hydra"}
    problem = unknown_key(key, keys_of(ours), value, choices_with(key))
    section, _, rest = key.partition(".")
    if section in _OPEN and rest:
        advice = f"; a further argument of its _target_ is +{key}=VALUE"
        return Problem(key, value, problem.message + advice)
    return problem


def _try_each(found: Diagnosis, composer: Composer) -> None:
    """Keep overrides that compose with those before them; report the others."""
    words, found.good = found.good, []
    for word in words:
        if why := failure(composer, [*found.good, word]):
            found.problems.append(Problem(word, NOTHING, why))
        else:
            found.good.append(word)


def failure(composer: Composer, given: Sequence[str]) -> str:
    """Return why ``given`` does not compose; empty if it does."""
    try:
        composer.compose(given)
    except Exception as error:  # Hydra and OmegaConf raise ValueError, AssertionError and more
        return reason(error)
    return ""


def unresolved(node: Any, path: str) -> Iterator[Problem]:
    """Yield each value below ``node`` that refers to something which does not exist."""
    raw: Any = OmegaConf.to_container(node, resolve=False)
    items = raw.items() if isinstance(raw, dict) else enumerate(raw or ())
    for key, value in items:
        where = f"{path}.{key}" if path else str(key)
        try:
            content = node[key]
        except (OmegaConfBaseException, HydraException, ValueError, TypeError) as error:
            if not OmegaConf.is_missing(node, key):
                yield Problem(where, value, f"cannot be resolved: {reason(error)}")
            continue
        if OmegaConf.is_config(content):
            yield from unresolved(content, where)
