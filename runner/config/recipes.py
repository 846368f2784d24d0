"""Recipes: published settings and a user's own, one file each, that Hydra can choose by name.

A recipe chooses options of groups and gives values. Its values for a group belong to the option
that it chooses: the learning rate of a recipe for SGD is no learning rate for AdamW. So Hydra gets
each recipe in parts. ``recipe/<name>`` holds the choices, and the values of all other groups.
``hydra/recipe/<name>/<group>/<option>`` holds the values of a chosen group; Hydra merges it only if
the job, which may be one of a sweep, has that option.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from runner.config.folders import Refusal, find, read_yaml

NONE = "none"

TARGETS = ("model", "data", "optimizer", "scheduler")
"""Groups with an option ``custom``: it has no arguments, for a target that is given."""


@dataclass(frozen=True)
class Recipe:
    """One file of ``recipes/``, or of the folder ``recipe`` of a user's configuration."""

    name: str
    purpose: str = ""
    source: str = ""
    content: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def read_all(homes: Iterable[Path] | None = None) -> list[Recipe]:
    """Return every recipe of the folders ``homes``; one that cannot be read has its error."""
    files = _files(homes or [find("recipes")])
    return [_read(files[name]) for name in sorted(files)]


def _files(homes: Iterable[Path]) -> dict[str, Path]:
    return {file.stem: file for home in homes for file in home.glob("*.yaml")}


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


class RecipeSource(ConfigSource):  # type: ignore[misc, unused-ignore]
    """The group ``recipe``: its path lists the folders of recipes; later ones come first."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self.files = _files(Path(home) for home in self.path.split(os.pathsep))

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path == "recipe"

    def is_config(self, config_path: str) -> bool:
        return self._part(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "" and results_filter != ObjectType.CONFIG:
            return ["recipe"]
        return sorted({NONE, *self.files}) if config_path == "recipe" else []

    def load_config(self, config_path: str) -> ConfigResult:
        content = self._part(config_path)
        if content is None:
            raise ConfigLoadError(f"there is no {config_path}")
        node = OmegaConf.create(content)
        return ConfigResult(self.provider, self.path, node, {"package": "_global_"})

    def _part(self, path: str) -> dict[str, Any] | None:
        """Return what Hydra reads at a path: a recipe, or a part of one; None if it is neither."""
        path = path.removesuffix(".yaml")
        group, name, *rest = [*path.removeprefix("hydra/").split("/"), ""]
        if group != "recipe" or name not in self.files:
            return {"recipe": NONE} if path == f"recipe/{NONE}" else None
        recipe = _read(self.files[name])
        if recipe.error is not None:
            raise Refusal(recipe.error)
        given = {key: one for key, one in recipe.content.items() if isinstance(one, dict)}
        defaults: list[Any] = [*(recipe.content.get("defaults") or ())]
        for section in TARGETS:
            if "_target_" in given.get(section, {}):  # takes the place of an option
                defaults = [one for one in defaults if section not in _chosen([one])]
                defaults.append({f"override /{section}": "custom"})
        chosen = _chosen(defaults)
        sections = [one for one in chosen if one in given]
        if path.startswith("recipe"):
            others = {key: one for key, one in recipe.content.items() if key not in sections}
            return {**others, "defaults": defaults, "recipe": name}
        match rest[:-1]:
            case []:
                home = f"optional /hydra/recipe/{name}"
                parts = [{f"{home}/{one}@_global_": f"${{{one}}}"} for one in sections]
                return {"defaults": parts} if parts else None
            case [section, option] if section in sections and chosen[section] == option:
                return {section: recipe.content[section]}
        return None


def _chosen(defaults: list[Any]) -> dict[str, str]:
    """Return the options that a defaults list chooses, by group: ``- override /clip: norm``."""
    pairs = [pair for one in defaults if isinstance(one, dict) for pair in one.items()]
    words = [(str(key).partition(" "), option) for key, option in pairs]
    return {key[2].strip().lstrip("/"): one for key, one in words if key[0] == "override"}
