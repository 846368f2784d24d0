"""Set the values of overrides in a composition, each as Hydra sets ``++key=value``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict

from runner.config.check import owned_keys
from runner.config.problem import (
    NOTHING,
    Problem,
    RequestError,
    did_you_mean,
    leaves,
    unknown_key,
)

OPEN = ("model", "data", "optimizer", "scheduler", "loss")
"""Sections that pass any key to their target."""


def set_value(one: Override, config: DictConfig, others: Iterable[Override] = ()) -> str:
    """Set or remove a value in ``config``; return the override with which Hydra does the same.

    A section of ``OPEN`` takes a key that its option lacks only with a plus, or if one of the
    overrides ``others`` names another target.
    """
    key = one.get_key_element().lstrip("+~")
    value = NOTHING if one.is_delete() else one.value()
    targets = [other.key_or_group for other in others if other.key_or_group.endswith("_target_")]
    named = any(key.startswith(target.removesuffix("_target_")) for target in targets)
    added = one.is_add() or one.is_force_add() or named
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


def drop_arguments(values: Sequence[Override], config: DictConfig) -> list[str]:
    """Remove the arguments of each option whose target is replaced; return that as overrides."""
    words = []
    for one in values:
        section, _, last = one.key_or_group.partition(".")
        node: Any = config.get(section) if section in (*OPEN, "clip") else None
        if last != "_target_" or not OmegaConf.is_dict(node) or node.get(last) == one.value():
            continue
        owned = owned_keys({"clip": {"_target_": one.value()}})
        gone = [str(key) for key in node if f"{section}.{key}" not in owned]
        with open_dict(node):
            for key in gone:
                del node[key]
        words += [f"~{section}.{key}" for key in gone]
    return words


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


def reason(error: BaseException) -> str:
    """Return Hydra's message on one line, without its advice to add ``+``, which hides typos."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        option = error.missing_cfg_file.rpartition("/")[2]
        near, options = did_you_mean(option, error.options), ", ".join(error.options)
        return f"there is no {error.missing_cfg_file}{near}  (options: {options})"
    lines = f"{error}\n{error.__cause__ or ''}".splitlines()
    noise = ("To append", "full_key", "object_type")
    kept = [line.strip() for line in lines if not line.strip().startswith(noise)]
    return " ".join(filter(None, kept)) or type(error).__name__
