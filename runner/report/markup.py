"""Build HTML in which text stays text.

A plain string is escaped; only the `Markup` that `tag` returns is inserted as it is. A name such as
``<script>`` in a configuration therefore never becomes an element.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

Attribute = str | float | bool | None


class Markup(str):
    """A string of HTML."""

    __slots__ = ()


Child = str | float | Markup | None

# HTML's elements that are never closed.
_VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta"})


def join(children: Iterable[Child]) -> Markup:
    """Join children; plain strings are escaped, None is left out."""
    known = (child for child in children if child is not None)
    return Markup("".join(c if isinstance(c, Markup) else html.escape(str(c)) for c in known))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return one element."""
    written = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        written += f" {key.rstrip('_').replace('_', '-')}"
        if value is not True:
            text = round(value, 2) if isinstance(value, float) else value
            written += f'="{html.escape(str(text))}"'
    return Markup(f"<{written}>" if name in _VOID else f"<{written}>{join(children)}</{name}>")
