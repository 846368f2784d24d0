"""Layouts and modes that were made for a model, kept from one call to the next.

Making a layout costs about a tenth of clipping, and a collective where parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from runner.clip.layout import Layout
from runner.clip.mode import ClipMode, build
from runner.clip.shard import is_dtensor
from runner.clip.wrapped import without_wrappers

MOST_MODES = 8
"""Modes that are kept for a model; a schedule of thresholds would make one for each step."""


@dataclass
class Bound:
    """The layout of a model, and modes that are bound to it."""

    layout: Layout
    mark: list[Any]
    _modes: dict[tuple[Any, ...], ClipMode] = field(default_factory=dict)

    def mode(self, kind: str, options: dict[str, Any]) -> ClipMode:
        """Return a mode that is bound to the layout. A mode with a history is always a new one."""
        key = (kind, repr(sorted(options.items())))
        if key not in self._modes:
            mode = build(kind, **options)
            mode.bind(self.layout)
            if mode.history:
                return mode
            if len(self._modes) >= MOST_MODES:
                self._modes.clear()
            self._modes[key] = mode
        return self._modes[key]


_bound = WeakIdKeyDictionary()
"""For each module the :class:`Bound` that was made last."""


def bound(model: nn.Module) -> Bound:
    """Return the layout of a model; a new one if its parameters or their placements have changed.

    Where parameters are sharded, a new layout takes a collective: all ranks have to call this, and
    to change their parameters together.
    """
    mark = [*_mark(model)]
    known: Bound | None = _bound.get(model)  # type: ignore[no-untyped-call]
    if known is None or known.mark != mark:
        known = _bound[model] = Bound(Layout.of_model(without_wrappers(model)), mark)
    return known


def _mark(model: nn.Module) -> Iterator[Any]:
    """Yield what a layout depends on. The layout keeps the parameters, so that no id is reused."""
    for parameter in model.parameters():
        yield id(parameter)
        yield parameter.shape
        if is_dtensor(parameter):
            yield parameter.placements
            yield id(parameter.device_mesh)
