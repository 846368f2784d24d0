"""The better one of two values of a metric."""

from __future__ import annotations


def higher_is_better(metric: str) -> bool:
    """Return whether higher values of a metric are better: of an accuracy they are, else lower."""
    return metric.endswith("accuracy")
