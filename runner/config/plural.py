"""Counts as they are printed: ``1 step``, ``2 steps``."""

from __future__ import annotations


def plural(count: int, noun: str, form: str = "") -> str:
    """Write ``count`` with ``noun``, which gets an ``s`` unless there is exactly one.

    Args:
        count: how many.
        noun: what is counted, in the singular.
        form: format specification of the number, such as ``,``.
    """
    return f"{count:{form}} {noun}{'' if count == 1 else 's'}"
