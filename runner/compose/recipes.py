"""Recipes: published settings and a user's own, one file each, that Hydra can choose by name.

A recipe chooses options of groups and gives values. Its values for a group belong to the option
that it chooses: the learning rate of a recipe for SGD is no learning rate for AdamW. So Hydra gets
each recipe in parts. ``recipe/<name>`` holds the choices, and the values of all other groups.
``hydra/recipe/<name>/<group>/<option>`` holds the values of a chosen group; Hydra merges it only if
the job, which may be one of a sweep, has that option.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore

from runner.config.folders import find
from runner.config.values import Refusal
from runner.config.yaml_file import read_yaml

NONE = "none"


@dataclass(frozen=True)
class Recipe:
    """One file of ``recipes/``, or of the folder ``recipe`` of a user's configuration."""

    name: str
    purpose: str = ""
    source: str = ""
    content: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def folders(search_path: ConfigSearchPath | None = None) -> list[Path]:
    """Return the folders that hold recipes: this project's, and those of a user."""
    listed = [] if search_path is None else reversed(search_path.get_path())
    paths = [(one.path or "").removeprefix("file://") for one in listed]
    own = [Path(path, "recipe") for path in paths if path and "://" not in path]
    return [find("recipes"), *(folder for folder in own if folder.is_dir())]


def read_all(homes: Iterable[Path] | None = None) -> list[Recipe]:
    """Return every recipe of the folders ``homes``; one that cannot be read has its error."""
    return [_read(file) for file in _files(homes)]


def read(given: Sequence[str]) -> list[Recipe]:
    """Return this project's recipes, or none if no override of ``given`` can choose one."""
    words = " ".join(word for word in given if "recipe" in word)
    if not words:
        return []
    found = [
        _read(file) if "(" in words or file.stem in words else Recipe(file.stem)
        for file in _files()
    ]
    # A recipe may be a sweep over recipes.
    return read_all() if any("recipe" in str(one.content) for one in found) else found


def _files(homes: Iterable[Path] | None = None) -> list[Path]:
    chosen = {
        file.stem: file for home in homes or folders() for file in sorted(home.glob("*.yaml"))
    }
    return [chosen[name] for name in sorted(chosen)]


def register(found: Iterable[Recipe]) -> dict[str, str]:
    """Make each recipe of ``found`` a choice of the group ``recipe``."""
    store = ConfigStore.instance()
    store.repo.pop("recipe", None)
    store.repo.get("hydra", {}).pop("recipe", None)
    store.store(group="recipe", name=NONE, node={"recipe": NONE}, package="_global_")
    found = list(found)
    for recipe in found:
        _store(store, recipe)
    return {recipe.name: recipe.error for recipe in found if recipe.error is not None}


def _store(store: ConfigStore, recipe: Recipe) -> None:
    content = dict(recipe.content)
    sections = {
        group: (option, content.pop(group))
        for group, option in choices(content.get("defaults")).items()
        if isinstance(content.get(group), dict)
    }
    node = {**content, "recipe": recipe.name}
    store.store(group="recipe", name=recipe.name, node=node, package="_global_")
    if not sections:
        return
    home = f"hydra/recipe/{recipe.name}"
    parts = [{f"optional /{home}/{group}@_global_": f"${{{group}}}"} for group in sections]
    store.store(
        group="hydra/recipe", name=recipe.name, node={"defaults": parts}, package="_global_"
    )
    for group, (option, values) in sections.items():
        store.store(group=f"{home}/{group}", name=option, node={group: values}, package="_global_")


def choices(defaults: Any) -> dict[str, str]:
    """Return the options that a defaults list chooses, by group: ``- override /clip: norm``."""
    chosen = {}
    for entry in defaults if isinstance(defaults, list) else []:
        for key, option in entry.items() if isinstance(entry, dict) else ():
            word, _, group = str(key).partition(" ")
            if word == "override" and isinstance(option, str):
                chosen[group.strip().lstrip("/")] = option
    return chosen


def _read(file: Path) -> Recipe:
    try:
        content = read_yaml(file)
        if not isinstance(content, dict):
            raise Refusal(f"{file} cannot be read: it must hold keys and values")
    except Refusal as error:
        return Recipe(file.stem, error=str(error))
    first, _, others = file.read_text(encoding="utf-8").partition("\n")
    purpose = first.partition(":")[2] if first.startswith("#") else ""
    source = others.partition("# source:")[2].partition("\n")[0]
    return Recipe(file.stem, purpose.strip(), source.strip(), content)
