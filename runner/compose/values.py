"""Set the values of overrides in a composition, each as Hydra sets ``++key=value``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.config.check import owned_keys
from runner.config.clip_section import modes_with
from runner.config.problem import NOTHING, Problem, did_you_mean, leaves, or_list, unknown_key

OPEN = ("model", "data", "optimizer", "scheduler", "loss")
"""Sections that pass any key to their target."""


def plain_word(override: Override, sign: str | None = None) -> str:
    """Return the text of an override that lists no values, with another sign before its key."""
    key = override.get_key_element() if sign is None else f"{sign}{override.key_or_group}"
    if override.is_delete() and override.value() is None:
        return str(key)
    return f"{key}={override.get_value_string()}"


def _target_given(key: str, values: Iterable[Override]) -> bool:
    """Return whether overrides name another target for a section around ``key``."""
    return any(
        one.key_or_group.endswith("._target_")
        and key.startswith(one.key_or_group.removesuffix("_target_"))
        for one in values
    )


def dropped_arguments(values: Iterable[Override], config: DictConfig) -> list[str]:
    """Remove the arguments of the options whose target is replaced; return that as overrides."""
    words = []
    for one in values:
        section, _, last = one.key_or_group.partition(".")
        node: Any = config.get(section) if section in (*OPEN, "clip") else None
        if last != "_target_" or node is None or node.get("_target_") == one.value():
            continue
        owned = owned_keys({"clip": {"_target_": one.value()}})
        for key in [str(key) for key in node if f"{section}.{key}" not in owned]:
            with open_dict(node):
                del node[key]
            words.append(f"~{section}.{key}")
    return words


def apply(
    one: Override, config: DictConfig, others: Sequence[Override] = (), gone: Sequence[str] = ()
) -> tuple[str | None, list[Problem]]:
    """Set or remove a value in ``config``; return the override for Hydra, and what is wrong."""
    key, value = one.key_or_group, one.value()
    try:
        if one.is_delete():
            if not has(config, key):
                known = f"~{key}" in gone
                return None, [] if known else [_unknown(key, NOTHING, config)]
            parent, _, last = key.rpartition(".")
            node: Any = OmegaConf.select(config, parent) if parent else config
            with open_dict(node):
                del node[last]
            return f"~{key}", []
        exists = has(config, key)
        # Only a section whose target was named, or a plus, takes keys that its option lacks.
        closed = key.partition(".")[0] in OPEN and not (one.is_add() or one.is_force_add())
        unknown = [
            _unknown(leaf, content, config)
            for leaf, content in (leaves(key, value) if closed else ())
            if not has(config, leaf) and not _target_given(leaf, others)
        ]
        if unknown:
            return None, unknown
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except Exception as error:  # OmegaConf raises TypeError, IndexError and more for odd keys
        return None, [Problem(key, NOTHING if one.is_delete() else value, reason(error))]
    sign = "" if exists and not isinstance(value, dict) else "++"
    if not exists and one.is_add():
        sign = "+"
    return plain_word(one, sign), []


def has(config: DictConfig, key: str) -> bool:
    """Return whether a dotted key exists, also where it has no value yet."""
    node: Any = config
    for part in key.replace("[", ".").replace("]", "").split("."):
        if OmegaConf.is_list(node) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif OmegaConf.is_dict(node) and part in [*node]:
            node = None if OmegaConf.is_missing(node, part) else node[part]
        else:
            return False
    return True


def _unknown(key: str, value: Any, config: DictConfig) -> Problem:
    """Return the problem of a key of ours, or of a target, that does not exist."""
    plain: Any = OmegaConf.to_container(config)
    known = {*owned_keys(plain)}
    section, _, rest = key.partition(".")
    if section in OPEN:
        known |= {leaf for leaf, _ in leaves(section, plain.get(section, {}))}
    problem = unknown_key(key, known, value)
    if section in OPEN and rest and value is not NOTHING:
        advice = f"; a further argument of its _target_ is +{key}=VALUE"
        return Problem(key, value, problem.message + advice)
    if section == "clip" and (modes := modes_with(rest.partition(".")[0])):
        return Problem(key, value, f"is an option of {or_list(f'clip={mode}' for mode in modes)}")
    return problem


def reason(error: BaseException) -> str:
    """Return Hydra's message on one line, without its advice to add ``+``, which hides typos."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        near, options = did_you_mean(option, error.options), ", ".join(error.options)
        return f"chooses {group}/{option}, which does not exist{near}  (options: {options})"
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


def unresolved(node: Any, path: str = "") -> Iterator[Problem]:
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
