"""What runs of a sweep are compared by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def objective_of(summary: Mapping[str, Any], key: str) -> float | None:
    """The figure ``key`` of a run's summary, or None where the run did not record it.

    Its best where the summary keeps one (losses and accuracies), else the last.
    """
    for part in (summary.get("best"), summary.get("final"), summary):
        value = part.get(key) if isinstance(part, Mapping) else None
        if isinstance(value, str):  # how a file spells what is not finite
            value = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None
