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
    """The content of one file."""

    choices: dict[str, str]  # of options, by group
    content: dict[str, Any]
    names: dict[str, Any]  # the option or the target that it names for a section
    is_global: bool  # by Hydra's header # @package _global_: an experiment


def files_of(config_dir: Path | None = None) -> dict[str, Path]:
    """Return the files of all recipes by name; a user's own file replaces ours."""
    folders = [find("recipes")]
    if config_dir:
        folders.append(config_dir / "recipe")
    files = {}
    for folder in folders:
        files.update({file.stem: file for file in folder.glob("*.yaml") if file.is_file()})
    return dict(sorted(files.items()))


def purpose(file: Path) -> str:
    """Return what a recipe is for, by its first line: ``# name: purpose``."""
    text = file.read_text(encoding="utf-8", errors="replace")
    match = re.match(r"#[^:\n]*:(.*)", text)
    return match[1].strip() if match else ""


def read(file: Path) -> Recipe:
    """Return a recipe or an experiment. A Refusal says why a file cannot be read as one."""
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise Refusal(f"{file} cannot be read: it must hold keys and values")
    choices = _choices(content, file)
    targets = {
        section: values["_target_"]
        for section, values in content.items()
        if isinstance(values, dict) and "_target_" in values
    }
    header = re.search(r"(?m)^# *@package +_global_", file.read_text(encoding="utf-8"))
    return Recipe(choices, content, names=choices | targets, is_global=header is not None)


def _choices(content: dict[str, Any], file: Path) -> dict[str, str]:
    """Take the defaults list out of the content, and return the options that it chooses."""
    defaults = content.pop("defaults", None) or []
    if not isinstance(defaults, list):
        raise Refusal(f"{file}: defaults must be a list")
    choices = {}
    for entry in defaults:
        for key, option in (entry if isinstance(entry, dict) else {entry: None}).items():
            override, _, group = str(key).partition(" ")
            if override == "override":
                choices[group.strip().lstrip("/")] = str(option)
            elif key != "_self_":
                raise Refusal(f"{file}: {key} in its defaults is no 'override /GROUP: OPTION'")
    return choices
