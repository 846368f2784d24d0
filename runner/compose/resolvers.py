"""Resolvers of ``${runner...:}`` in the configuration."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.compose import recipes
from runner.config.check import owned_keys
from runner.config.folders import outputs
from runner.config.problem import MISSING, shown
from runner.config.schema import SHORT

# Keys that are set by choosing an option of a group.
_CHOSEN = {"plugin.name", "clip.mode", "precision.name", "tracker.name", "recipe"}


def register() -> None:
    """Register the resolvers with OmegaConf; repeated calls have no effect."""
    # Kept within one composition, so that a run has one name; fresh for the next.
    OmegaConf.register_new_resolver(
        "runner.id", lambda: secrets.token_hex(3), use_cache=True, replace=True
    )
    functions: dict[str, Callable[..., Any]] = {
        "outputs": lambda: str(outputs()),
        "first": _first,
        "groups": _for_help(_groups),
        "recipes": _for_help(_recipes),
        "keys": _for_help(_keys),
    }
    for name, function in functions.items():
        OmegaConf.register_new_resolver(f"runner.{name}", function, replace=True)


def _first(*values: Any) -> Any:
    """Return the first value that is not null."""
    return next((value for value in values if value is not None), None)


def _for_help(text: Callable[[Container], str]) -> Callable[..., str]:
    """Return a resolver of a part of the help, which values of a run cannot refer to."""

    def resolve(*, _root_: Container, _parent_: Container) -> str:
        if _parent_ is None or not _parent_._get_full_key("").startswith("hydra.help"):
            raise ValueError("this is a part of --help, not of a run")
        return text(_root_)

    return resolve


def _groups(_: Container) -> str:
    """Return groups and their options for ``--help``, also those of ``--config-dir``."""
    loader = GlobalHydra.instance().config_loader()
    groups = sorted(set(loader.list_groups("")) - {"hydra", "recipe"})
    return _table((group, ", ".join(loader.get_group_options(group))) for group in groups)


def _recipes(_: Container) -> str:
    """Return recipes with their purposes, or with why they cannot be read, for ``--help``."""
    homes = recipes.folders(GlobalHydra.instance().config_loader().get_search_path())
    found = recipes.read_all(homes)
    return _table((recipe.name, recipe.error or recipe.purpose) for recipe in found)


def _keys(root: Container) -> str:
    """Return the owned keys with their values in this composition, for ``--help``."""
    rows = []
    short = {key: section for section, key in SHORT.items()}
    clip = _plain(OmegaConf.select(root, "clip"))
    for key in owned_keys({"clip": clip}).values():
        if key.name in _CHOSEN or key.name.endswith("._target_"):
            continue
        try:
            value = OmegaConf.select(root, key.name, default=key.default)
        except OmegaConfBaseException:
            value = MISSING
        rows.append((f"{short.get(key.name, key.name)}={shown(_plain(value))}", key.meaning))
    return _table(rows)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _table(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    text = "".join(f"  {name:<{width}}  {rest}".rstrip() + "\n" for name, rest in rows)
    return text.replace("$", "$$")  # the help is a string.Template
