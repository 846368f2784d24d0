"""Thresholds of the recipes, for comparison with what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import yaml

from runner.compose import recipes
from runner.config.folders import find

NEAREST = 4
"""Largest number of recipes that are named."""


@dataclass(frozen=True)
class Published:
    """The threshold of a recipe."""

    recipe: str
    kind: str
    mode: str
    threshold: float
    source: str


def published() -> list[Published]:
    """Return all recipes of one run that set a threshold, sorted by name."""
    found = []
    for recipe in recipes.read_all():
        content, chosen = recipe.content, recipes.choices(recipe.content.get("defaults"))
        threshold = (content.get("clip") or {}).get("threshold")
        if "hydra" in content or not isinstance(threshold, int | float):
            continue
        mode, kind = chosen.get("clip", "norm"), _kind(chosen.get("data"), content)
        found.append(Published(recipe.name, kind, mode, float(threshold), recipe.source))
    return found


def nearest(mode: str, kind: str, start: float | None) -> list[Published]:
    """Return recipes of this mode and kind of data, the threshold nearest to ``start`` first."""
    alike = [one for one in published() if one.mode == mode]
    alike = [one for one in alike if one.kind == kind] or alike
    if start is not None:
        alike.sort(key=lambda one: abs(math.log(one.threshold / start)))
    return alike[:NEAREST]


def _kind(data: str | None, content: dict[str, Any]) -> str:
    """Return ``language`` for data that has a sequence length and, if it has a kind, is tokens."""
    file = find("conf") / "data" / f"{data}.yaml"
    options = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    options |= content.get("data") or {}
    tokens = "sequence_length" in options and options.get("kind", "tokens") == "tokens"
    return "language" if tokens else "vision"
