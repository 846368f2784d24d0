"""Set the values of overrides in a composition, each as Hydra sets ``++key=value``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict

from runner.compose.recipes import TARGETS
from runner.config.check import owned_keys
from runner.config.problem import (
    NOTHING,
    Problem,
    RequestError,
    did_you_mean,
    leaves,
    unknown_key,
)

OPEN = (*TARGETS, "loss")
"""Sections that pass any key to their target."""

_NUMBERS = {"clip": "clip.threshold", "accumulation": "accumulation.steps"}
"""The key that a number in place of an option of a group means."""


def set_value(one: Override, config: DictConfig, takes_any: bool = False) -> str:
    """Set or remove a value in ``config``; return the override with which Hydra does the same.

    A section of ``OPEN`` takes a key that its option lacks with a plus, or if it ``takes_any``.
    """
    key = one.get_key_element().lstrip("+~")
    value = NOTHING if one.is_delete() else one.value()
    added = one.is_add() or one.is_force_add() or takes_any
    there = exists(config, key)
    unknown: list[tuple[str, Any]] = []
    if one.is_delete():
        unknown = [] if there else [(key, NOTHING)]
    elif key.partition(".")[0] in OPEN and not added:
        unknown = [leaf for leaf in leaves(key, value) if not exists(config, leaf[0])]
    if unknown:
        raise RequestError(_unknown(leaf, content, config) for leaf, content in unknown)
    try:
        if one.is_delete():
            parent, _, last = key.rpartition(".")
            with open_dict(config):
                del (OmegaConf.select(config, parent) if parent else config)[last]
            return f"~{key}"
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except Exception as error:  # OmegaConf raises TypeError, IndexError and more for odd keys
        raise RequestError([Problem(key, value, reason(error))]) from None
    sign = "" if there and not isinstance(value, dict) else "+" if one.is_add() else "++"
    return f"{sign}{key}={one.get_value_string()}"


def drop_arguments(section: str, config: DictConfig) -> list[str]:
    """Remove the arguments of a target; return that as overrides."""
    node = config[section]
    gone = [str(key) for key in node if f"{section}.{key}" not in owned_keys()]
    with open_dict(node):
        for key in gone:
            del node[key]
    return [f"~{section}.{key}" for key in gone]


def exists(config: DictConfig, key: str) -> bool:
    """Return whether a dotted key exists, also where it has no value yet."""
    section, dot, _ = key.partition(".")
    if not dot or section not in [*config]:
        return section in [*config]
    if OmegaConf.is_missing(config, section) or not OmegaConf.is_config(config[section]):
        return False
    names = [name for name, _ in leaves(section, OmegaConf.to_container(config[section]))]
    return any(name == key or name.startswith(f"{key}.") for name in names)


def _unknown(key: str, value: Any, config: DictConfig) -> Problem:
    plain: Any = OmegaConf.to_container(config)
    section = key.partition(".")[0]
    known = {*owned_keys(plain)}
    if section not in OPEN:
        return unknown_key(key, known, value)
    problem = unknown_key(key, known | {leaf for leaf, _ in leaves("", plain)}, value)
    advice = f"; a further argument of its _target_ is +{key}=VALUE" if "." in key else ""
    return Problem(key, value, problem.message + advice)


def no_option(group: str, option: str, options: Sequence[str]) -> str:
    near, listed = did_you_mean(option, options), ", ".join(options)
    if group in _NUMBERS and re.fullmatch(r"[\d.e-]+", option):
        near = f"; did you mean {_NUMBERS[group]}={option}?"
    if group in OPEN:
        listed += f"; any class or function by its full name: {group}=package.name"
    return f"there is no {group}/{option}{near}  (options: {listed})"


def reason(error: BaseException) -> str:
    """Return Hydra's message on one line, without its advice to add ``+``, which hides typos."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return no_option(group, option, error.options)
    lines = f"{error}\n{error.__cause__ or ''}".splitlines()
    noise = ("To append", "full_key", "object_type")
    kept = [line.strip() for line in lines if not line.strip().startswith(noise)]
    return " ".join(filter(None, kept)) or type(error).__name__
