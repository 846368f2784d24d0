"""Modes with an option ``history``, which says which norms they remember."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runner.clip.mode import ClipMode


@dataclass(eq=False)
class PastNorms(ClipMode):
    """Base of a mode that remembers norms as they were measured, or as they were clipped.

    Option ``history`` is ``"raw"`` or ``"clipped"``. Once the mode is made, the attribute of that
    name holds what it remembers, as in every mode.
    """

    _keeps_clipped: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        chosen: Any = self.history
        if chosen not in ("raw", "clipped"):
            raise ValueError(f"history must be raw or clipped, not {chosen!r}")
        self._keeps_clipped = chosen == "clipped"
        super().__post_init__()

    @property
    def _past(self) -> dict[str, Any]:
        past: dict[str, Any] = vars(self)["history"]
        return past
