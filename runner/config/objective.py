"""Which value of a metric is the better one."""

from __future__ import annotations


def higher_is_better(metric: str) -> bool:
    """Return whether a higher value of a metric is better: of an accuracy it is, else the lower."""
    return metric.endswith("accuracy")
