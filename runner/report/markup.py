"""HTML and SVG built so that text is always text.

Whatever is a plain string is escaped on its way in; only what `tag` returned goes in as it is. A
name such as ``<script>`` in a configuration can therefore not become an element by an oversight.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

Attribute = str | float | bool | None


class Markup(str):
    """A string that is HTML already."""

    __slots__ = ()


Child = str | float | Markup | None


def escaped(text: object) -> Markup:
    """``text`` as HTML that shows it literally."""
    return Markup(html.escape(str(text), quote=True))


def join(children: Iterable[Child]) -> Markup:
    """All children, one after the other; plain strings are escaped, None is left out."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else escaped(child)
            for child in children
            if child is not None
        )
    )


# HTML's elements that are never closed.
_VOID = frozenset({"br", "col", "hr", "img", "link", "meta"})


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """One element.

    Args:
        name: of the element, HTML or SVG.
        children: its content; plain strings are escaped.
        attributes: ``class_`` stands for ``class``, and ``_`` for ``-`` elsewhere
            (``stroke_width``, ``data_key``). None and False leave an attribute out, True gives it
            no value, numbers are written with at most two decimals.
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
    text = short(value) if isinstance(value, float) else html.escape(str(value), quote=True)
    return f' {key}="{text}"'


def short(value: float) -> str:
    """A coordinate: at most two decimals, and no trailing zeros."""
    if not math.isfinite(value):
        return "0"
    return f"{value:.2f}".rstrip("0").rstrip(".")
