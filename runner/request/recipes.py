"""Recipes, published settings and a user's own, and experiments of a user: one file each.

Such a file chooses options of groups, ``defaults: [{override /clip: norm}]``, and gives values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.folders import Refusal, find, read_yaml


@dataclass(frozen=True)
class Recipe:
    choices: dict[str, str]  # of options, by group
    content: dict[str, Any]
    names: dict[str, Any]  # the option or the target that it names for a section
    is_global: bool  # whether it says so in the form of Hydra: # @package _global_


def files_of(extra: Path | None = None) -> dict[str, Path]:
    """Return the files of all recipes by name; those of a user's own folder come first."""
    homes = [find("recipes"), *([extra / "recipe"] if extra else [])]
    files = {file.stem: file for home in homes for file in home.glob("*.yaml") if file.is_file()}
    return dict(sorted(files.items()))


def purpose(file: Path) -> str:
    """Return what a recipe is for, by its first line: ``# name: purpose``."""
    found = re.match(r"#[^:\n]*:(.*)", file.read_text(encoding="utf-8", errors="replace"))
    return found[1].strip() if found else ""


def read(file: Path) -> Recipe:
    """Read a recipe or an experiment. A Refusal says why a file cannot be read as one."""
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise Refusal(f"{file} cannot be read: it must hold keys and values")
    choices, defaults = {}, content.pop("defaults", None) or []
    if not isinstance(defaults, list):
        raise Refusal(f"{file}: defaults must be a list")
    for entry in defaults:
        for key, option in (entry if isinstance(entry, dict) else {entry: None}).items():
            override, _, group = str(key).partition(" ")
            if override == "override":
                choices[group.strip().lstrip("/")] = str(option)
            elif key != "_self_":
                raise Refusal(f"{file}: {key} in its defaults is no 'override /GROUP: OPTION'")
    header = re.search(r"(?m)^# *@package +_global_", file.read_text(encoding="utf-8"))
    given = {key: one for key, one in content.items() if isinstance(one, dict)}
    targets = {key: one["_target_"] for key, one in given.items() if "_target_" in one}
    return Recipe(choices, content, choices | targets, header is not None)
