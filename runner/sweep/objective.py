"""What runs of a sweep are compared by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from runner.sweep.record import Entry


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


def best(entries: Iterable[Entry], maximizes: bool) -> Entry | None:
    """The finished run whose objective is best; None where none has a finite one."""
    known = [
        (entry.objective, entry)
        for entry in entries
        if entry.state == "finished"
        and entry.objective is not None
        and math.isfinite(entry.objective)
    ]
    choose = max if maximizes else min
    return choose(known, key=lambda pair: pair[0])[1] if known else None
