"""Thresholds of the recipes, to set beside what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import yaml

from runner.compose import recipes
from runner.config.folders import find

NEAREST = 4
"""Recipes that are named at most."""


@dataclass(frozen=True)
class Published:
    """What one recipe clips at.

    Attributes:
        recipe: its name.
        kind: ``language`` or ``vision``.
        mode: of clipping.
        threshold: λ.
        source: as its header gives it.
    """

    recipe: str
    kind: str
    mode: str
    threshold: float
    source: str


def published() -> list[Published]:
    """Every recipe that is one run and gives a threshold, by name."""
    found = []
    for recipe in recipes.read_all():
        content, chosen = recipe.content, recipes.choices(recipe.content.get("defaults"))
        threshold = (content.get("clip") or {}).get("threshold")
        if "hydra" in content or not isinstance(threshold, int | float):
            continue
        mode, kind = chosen.get("clip", "norm"), _kind(chosen.get("data"), content)
        found.append(Published(recipe.name, kind, mode, float(threshold), _source(recipe.name)))
    return found


def nearest(mode: str, kind: str, start: float | None) -> list[Published]:
    """Recipes of this mode and kind of data, the threshold nearest to ``start`` first.

    Thresholds of different modes are in different units, so those of another mode are never given;
    those of another kind are, where there is none of this.

    Args:
        mode: ``norm``, ``value`` or ``adaptive``.
        kind: ``language``, ``vision`` or ``other``.
        start: what was suggested.
    """
    alike = [one for one in published() if one.mode == mode]
    alike = [one for one in alike if one.kind == kind] or alike
    if start is not None:
        alike.sort(key=lambda one: abs(math.log(one.threshold / start)))
    return alike[:NEAREST]


def _kind(data: str | None, content: dict[str, Any]) -> str:
    """Data is language where it comes in sequences; what can make both says so by ``kind``."""
    file = find("conf") / "data" / f"{data}.yaml"
    options = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    options |= content.get("data") or {}
    tokens = "sequence_length" in options and options.get("kind", "tokens") == "tokens"
    return "language" if tokens else "vision"


def _source(name: str) -> str:
    text = (find("recipes") / f"{name}.yaml").read_text(encoding="utf-8")
    for line in text.splitlines():
        head, _, source = line.partition("# source:")
        if not head and source:
            return source.strip()
    return ""
