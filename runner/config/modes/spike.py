"""Description of mode ``spike``, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from runner.config.modes.mode import Mode, ModeInfo
from runner.config.values import Natural


@dataclass(eq=False)
class Spike(Mode):
    """Elements whose square is above threshold x their second moment are clamped to that."""

    info = ModeInfo(
        clips="elements",
        by_tensor=True,
        stat="g²/v of an element",
        unit="g²/v",
        note="A threshold of this mode is a ratio to the optimizer's second moment of each "
        "element, not a value of ‖G‖, so none is drawn.",
        published=((5000.0, "SPAM (Huang 2025)"),),
        grid=(50.0, 500.0),
        shares=(0.0001, 0.01, 0.00001),
        sources=("Huang, Zhu, Jin, Liu, Wang and Liu 2025, arXiv 2501.06842, section 3",),
        needs_optimizer=True,
    )
    at_once: ClassVar = {"min_steps": 0}

    min_steps: Annotated[
        Natural,
        Field(
            description="compare with a second moment that has averaged at least so many steps, "
            "because the first ones are far too small"
        ),
    ] = 20


MODE = Spike
