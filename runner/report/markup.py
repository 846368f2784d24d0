"""Build HTML and SVG in which text stays text.

A plain string is escaped; only the `Markup` that `tag` returns is inserted as it is. A name such as
``<script>`` in a configuration therefore never becomes an element.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

Attribute = str | float | bool | None


class Markup(str):
    """A string of HTML."""

    __slots__ = ()


Child = str | float | Markup | None


def join(children: Iterable[Child]) -> Markup:
    """Join children; plain strings are escaped, None is left out."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else html.escape(str(child))
            for child in children
            if child is not None
        )
    )


# HTML's elements that are never closed.
_VOID = frozenset({"br", "col", "hr", "img", "link", "meta"})


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return one element.

    Args:
        name: name of the HTML or SVG element.
        children: content; plain strings are escaped.
        attributes: attributes by name, with ``_`` for ``-`` and without a last ``_``
            (``stroke_width``, ``class_``). None and False leave an attribute out, True writes it
            without a value, floats are written with at most two decimals.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    key = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {key}"
    text = short(value) if isinstance(value, float) else html.escape(str(value))
    return f' {key}="{text}"'


def short(value: float) -> str:
    """Format a coordinate with at most two decimals and no trailing zeros."""
    if not math.isfinite(value):
        return "0"
    return f"{value:.2f}".rstrip("0").rstrip(".")
