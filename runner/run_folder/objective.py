"""The metric that the runs of a sweep are compared by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.run_folder.strict_json import number


def objective_of(summary: Mapping[str, Any], key: str) -> float | None:
    """Return the metric ``key`` of a run's summary, or None if the run did not record it.

    That is its best value if the summary keeps one (losses and accuracies), else the last one.
    """
    for part in (summary.get("best"), summary.get("final"), summary):
        value = number(part.get(key)) if isinstance(part, Mapping) else None
        if value is not None:
            return value
    return None
