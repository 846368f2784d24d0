"""Description of mode ``percentile`` (AutoClip), and its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.config.modes.mode import Mode, ModeInfo
from runner.config.values import Count


@dataclass(eq=False)
class Percentile(Mode):
    """The whole gradient is scaled down to a percentile of the norms of all steps so far."""

    info = ModeInfo(
        clips="steps",
        stat="‖G‖",
        unit="%",
        note="Dashed: the percentile of the norms so far; norms above it are scaled down to it.",
        published=((10.0, "AutoClip (Seetharaman 2020)"),),
        follows="norms",
        tenth=90.0,
        sources=(
            "Seetharaman, Wichern, Pardo and Le Roux 2020, arXiv 2007.14469",
            "https://github.com/pseeth/autoclip",
        ),
    )
    at_once: ClassVar = {"threshold": 10.0, "min_steps": 1}

    window: Annotated[
        Count | None,
        Field(
            description="take the percentile of so many of the latest steps, so that it follows a "
            "change of the norms; null: of all steps, as published"
        ),
    ] = None
    history: Annotated[
        Literal["raw", "clipped"],
        Field(
            description="keep norms as they were measured (raw) or as they were clipped, which "
            "lets the limit fall more easily than rise"
        ),
    ] = "raw"
    min_steps: Annotated[
        Count,
        Field(
            description="clip from this step on, because a percentile of few norms is a matter of "
            "chance; 1: as published"
        ),
    ] = 10

    @classmethod
    def conflicts(cls, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield a percentile above 100, and a window that never holds ``min_steps`` norms."""
        if options["threshold"] > 100:
            yield "threshold", "is the percentile for clip=percentile: at most 100"
        window, least = options["window"], options["min_steps"]
        if window is not None and window < least:
            yield "window", f"never holds clip.min_steps={least} norms: use at least {least}"


MODE = Percentile
