"""Description of mode ``adagc``, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runner.config.modes.mode import Mode, ModeInfo
from runner.config.values import Natural, Positive


@dataclass(eq=False)
class AdaGC(Mode):
    """Each tensor's gradient norm is limited to threshold times its own running mean."""

    info = ModeInfo(
        clips="tensors",
        by_tensor=True,
        stat="‖g_p‖/γ_p of a tensor",
        unit="γ_p",
        note="A threshold of this mode is a ratio to each tensor's running mean of its norm, not a "
        "value of ‖G‖, so none is drawn.",
        published=((1.05, "AdaGC (Wang 2025): GPT-2, LLaMA-2 and CLIP"),),
        grid=(1.02, 1.2, 1.5, 2.0),
        sources=("Wang et al. 2025, AdaGC, arXiv 2502.11034, algorithm 1",),
    )

    at_once: ClassVar[Mapping[str, Any]] = {"threshold": 1.05, "warmup_steps": 1}
    unclipped: ClassVar[Mapping[str, Any]] = {"absolute": 1e30}

    absolute: Annotated[
        Positive,
        Field(description="limit the norm of the whole gradient to this in the warm-up"),
    ] = 1.0
    beta: Annotated[
        float,
        Field(ge=0, lt=1, description="weigh the steps before in the running mean of a norm"),
    ] = 0.98
    warmup_steps: Annotated[
        Natural,
        Field(description="collect the smallest norm of each tensor in so many first steps"),
    ] = 100
    history: Annotated[
        Literal["clipped", "raw"],
        Field(description="let norms after clipping, or those before it, enter the running mean"),
    ] = "clipped"


MODE = AdaGC
