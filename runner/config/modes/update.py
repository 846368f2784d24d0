"""Description of mode ``update``, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from runner.config.modes.mode import Mode, ModeInfo
from runner.config.values import Count, Positive


@dataclass(eq=False)
class Update(Mode):
    """The optimizer's update is limited; the gradient is measured, but not changed."""

    info = ModeInfo(
        clips="updates",
        by_tensor=True,
        stat="RMS of g/√v of a tensor",
        unit="RMS of g/√v",
        note="A threshold of this mode bounds the optimizer's update, not ‖G‖, so none is drawn.",
        published=((1.0, "StableAdamW (Wortsman 2023)"),),
        grid=(1.5, 2.0, 4.0),
        shares=(0.02, 0.1, 0.005),
        sources=(
            "Wortsman et al. 2023, arXiv 2304.13013, algorithm 2",
            "Levanter, src/levanter/optim/clip_update_norm.py (rule sigma)",
        ),
        needs_optimizer=True,
    )

    rule: Annotated[
        Literal["rms", "sigma"],
        Field(
            description="limit each tensor's update by its RMS, or the whole update to the mean of "
            "earlier ones + threshold x their standard deviation"
        ),
    ] = "rms"
    eps: Annotated[
        Positive,
        Field(description="count the root of a second moment as at least this (rule rms)"),
    ] = 1e-8
    window: Annotated[
        Count, Field(description="compare with so many earlier updates (rule sigma)")
    ] = 128

    @classmethod
    def waits_for(cls, options: Mapping[str, Any]) -> str:
        """Return why rule ``sigma`` waits: it limits the norm of the whole update."""
        if options["rule"] == "sigma":
            return "with clip.rule=sigma limits the whole update; use clip.rule=rms"
        return super().waits_for(options)

    @classmethod
    def info_with(cls, options: Mapping[str, Any]) -> ModeInfo:
        """Return the facts about the rule: with ``sigma`` λ is a number of standard deviations."""
        if options["rule"] == "rms":
            return cls.info
        stat, unit = "norm of the update", "standard deviations above the mean"
        return replace(
            cls.info,
            stat=stat,
            unit=unit,
            published=((3.0, "Levanter"),),
            grid=(),
            follows="updates",
        )


MODE = Update
