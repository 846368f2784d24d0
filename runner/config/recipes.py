"""Recipes, published settings and a user's own, and experiments of a user: one file each.

Such a file chooses options of groups, ``defaults: [{override /clip: norm}]``, and gives values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config.folders import Refusal, find, read_yaml


@dataclass(frozen=True)
class Recipe:
    name: str
    purpose: str = ""
    source: str = ""
    choices: dict[str, str] = field(default_factory=dict)  # of options, by group
    content: dict[str, Any] = field(default_factory=dict)
    is_global: bool = False  # whether it says so in the form of Hydra: # @package _global_

    @property
    def names(self) -> dict[str, str]:
        """The option or the target that this file names for a section."""
        given = {key: one for key, one in self.content.items() if isinstance(one, dict)}
        targets = {key: str(one["_target_"]) for key, one in given.items() if "_target_" in one}
        return self.choices | targets


def files_of(extra: Path | None = None) -> dict[str, Path]:
    """Return the files of all recipes by name; those of a user's own folder come first."""
    homes = [find("recipes"), *([extra / "recipe"] if extra else [])]
    return {file.stem: file for home in homes for file in sorted(home.glob("*.yaml"))}


def read_all(extra: Path | None = None) -> Iterator[Recipe]:
    """Yield every recipe; one that cannot be read has the reason as its purpose."""
    for name, file in sorted(files_of(extra).items()):
        try:
            yield read(file)
        except Refusal as error:
            yield Recipe(name, str(error))


def read(file: Path) -> Recipe:
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise Refusal(f"{file} cannot be read: it must hold keys and values")
    choices, defaults = {}, content.pop("defaults", None) or []
    if not isinstance(defaults, list):
        raise Refusal(f"{file}: defaults must be a list")
    for entry in defaults:
        pairs = entry.items() if isinstance(entry, dict) else [(entry, None)]
        for key, option in pairs:
            override, _, group = str(key).partition(" ")
            if override == "override":
                choices[group.strip().lstrip("/")] = str(option)
            elif key != "_self_":
                raise Refusal(f"{file}: {key} in its defaults is no 'override /GROUP: OPTION'")
    text = file.read_text(encoding="utf-8")
    about = {
        field: found[1].strip() if (found := re.search(form, text)) else ""
        for field, form in (("purpose", r"\A#[^:\n]*:(.*)"), ("source", r"(?m)^# source:(.*)"))
    }
    is_global = bool(re.search(r"(?m)^# *@package +_global_", text))
    return Recipe(file.stem, **about, choices=choices, content=content, is_global=is_global)
