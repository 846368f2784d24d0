"""What modes that hold other modes have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from runner.clip import ClipMode, Decision, Layout, Number, build, transfer
from runner.clip.decision import Inner
from runner.clip.layout import OptionError
from runner.clip.norms import combine
from runner.config.modes import Mode, inner_mode
from runner.config.problem import NOTHING
from runner.config.section import conflicts_of


def made(where: str, given: Any, outer: Mode, **options: Any) -> ClipMode:
    """Make a mode inside of another one, which is at the option ``where``."""
    try:
        kind, own = inner_mode(given, **options)
    except ValueError as error:
        listed: Any = getattr(error, "errors", list)()  # where pydantic has checked the options
        found = [f".{one.key}: {one.message}" for one in conflicts_of(listed, ())]
        raise ValueError(where + (found[0] if found else f" {error}")) from None
    shared = {"norm_type": outer.norm_type, "scales": outer.scales}
    return build(kind, **own, **options, **shared)


def bind(mode: ClipMode, layout: Layout, where: str) -> None:
    """Bind a mode inside of another one."""
    try:
        mode.bind(layout)
    except OptionError as error:
        option = f"{where}.{error.option}"
        value = getattr(mode, error.option) if error.value is NOTHING else error.value
        message = str(error).replace(f"clip.{error.option}", f"clip.{option}")
        raise OptionError(option, message, value) from None


@dataclass(eq=False)
class NestedMode(ClipMode):
    """A mode that holds others, by the option ``info.nested``, and has no λ of its own."""

    kind: ClassVar[Literal["link", "group"]]
    modes: dict[str, ClipMode] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        option = self.info.nested
        given = getattr(self, option) or {}
        named = given if isinstance(given, Mapping) else {str(i): m for i, m in enumerate(given)}
        if self.threshold is not None or not named:
            raise ValueError(f"{option} are at least one mode, with a threshold each and no other")
        self.modes = {name: made(f"{option}.{name}", one, self) for name, one in named.items()}

    def together(
        self,
        norm: Number,
        after: Number,
        decisions: Mapping[str, Decision],
        *,
        coef: Number | None = None,
        scales: Tensor | None = None,
        fraction: Number | None = None,
    ) -> Decision:
        """Return the decision that the modes come to, by their names; that of one is its own."""
        inner = tuple(
            Inner(self.kind, name, replace(one, parts=None, scales=None))
            for name, one in decisions.items()
        )
        if len(inner) == 1:
            return replace(*decisions.values(), inner=inner)
        clipped = combine([one.clipped for one in decisions.values()], math.inf)
        if not isinstance(norm, Tensor) and clipped == 0.0:
            # The same number twice, not a quotient of two that were rounded differently.
            after, coef, scales = norm, 1.0, None
        ratio = transfer.ratio(after, norm) if coef is None else coef
        share, nan = clipped if fraction is None else fraction, math.nan
        return Decision(norm, after, ratio, clipped, share, nan, nan, scales=scales, inner=inner)

    def state_dict(self) -> dict[str, Any]:
        kept = {
            name: {"class": type(mode).__name__, **mode.state_dict()}
            for name, mode in self.modes.items()
        }
        return super().state_dict() | {self.info.nested: kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; a mode inside of this one whose class has changed begins anew."""
        super().load_state_dict(state)
        known = state.get(self.info.nested, {})
        for name, mode in self.modes.items():
            if known.get(name, {}).get("class") == type(mode).__name__:
                mode.load_state_dict(known[name])
