"""Description of mode ``zscore`` (ZClip), and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from runner.config.modes.mode import Mode, ModeInfo
from runner.config.values import Count, Positive


@dataclass(eq=False)
class ZScore(Mode):
    """A gradient whose norm lies far above a running mean of the norms is scaled down."""

    info = ModeInfo(
        clips="steps",
        stat="‖G‖",
        unit="σ",
        note="Dashed: mean + threshold · σ of the norms so far; norms above it are clipped.",
        published=((2.5, "ZClip (Kumar 2025)"),),
        grid=(2.0, 3.0, 4.0),
        follows="norms",
        tenth=1.3,
        sources=(
            "Kumar, Owen, Chowdhury and Güra 2025, arXiv 2504.02507",
            "https://github.com/bluorion-com/ZClip",
        ),
    )
    at_once: ClassVar = {"threshold": 0.01, "warmup_steps": 2}

    rule: Annotated[
        Literal["adaptive_scaling", "mean", "percentile"],
        Field(
            description="scale a clipped norm down to: adaptive_scaling: nearer to the mean the "
            "larger it is; mean: the mean; percentile: the limit itself"
        ),
    ] = "adaptive_scaling"
    decay: Annotated[
        float,
        Field(
            gt=0,
            lt=1,
            description="weigh the earlier steps in the running mean and variance by this; a "
            "higher one follows changes of the norms more slowly",
        ),
    ] = 0.97
    warmup_steps: Annotated[
        Count,
        Field(description="start from mean and variance of so many steps, which are not clipped"),
    ] = 25
    history: Annotated[
        Literal["raw", "clipped"],
        Field(
            description="let norms enter mean and variance as they were clipped, as published, or "
            "as they were measured (raw), which accepts a lasting rise of the norms"
        ),
    ] = "clipped"
    eps: Annotated[
        Positive,
        Field(
            description="add this to the standard deviation; norms that vary by no more than this "
            "share of their mean are not clipped"
        ),
    ] = 1e-6


MODE = ZScore
