"""The clipping modes that hold no other mode: their options and facts, without torch.

``runner/clip/<name>.py`` implements the mode ``<name>``, and names its sources in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from runner.config.mode import Conflicts, Mode, ModeInfo, option
from runner.config.section import Count, Natural, OutputDims, Positive, Texts


@dataclass(eq=False)
class Unclipped(Mode):
    """The gradient is measured, but not clipped."""

    info = ModeInfo(None, "‖G‖", "‖G‖", "These runs clip nothing.", by_tensor=True)


@dataclass(eq=False)
class Norm(Mode):
    """The whole gradient is scaled down to a norm of at most the threshold (Pascanu 2013)."""

    info = ModeInfo(
        "steps",
        "‖G‖",
        "‖G‖",
        "Dashed: the threshold; norms above it are scaled down to it.",
        published=(
            (0.1, "Compressive Transformer (Rae 2019), gated convolutional LM (Dauphin 2016)"),
            (0.25, "AWD-LSTM (Merity 2017), CTRL (Keskar 2019)"),
            (1.0, "GPT-3 (Brown 2020), LLaMA (Touvron 2023), TaBERT (Yin 2020)"),
            (2.0, "Inception v3 (Szegedy 2015)"),
        ),
    )


@dataclass(eq=False)
class Value(Mode):
    """Every element of the gradient is clamped to [-threshold, threshold] (Mikolov 2012)."""

    info = ModeInfo(
        "elements",
        "gradient element",
        "|g|",
        by_tensor=True,
        grid=(0.1, 0.25, 1.0, 2.0),
        shares=(0.01, 0.1, 0.001),
    )


@dataclass(eq=False)
class Adaptive(Mode):
    """Each unit's gradient is limited to threshold x the norm of its weight (Brock 2021)."""

    info = ModeInfo(
        "units",
        "‖G_u‖/‖W_u‖ of a unit",
        "‖W_u‖",
        published=(
            (0.01, "NFNet at batch 4096 (Brock 2021)"),
            *((value, "NF-ResNet ablation (Brock 2021)") for value in (0.02, 0.04, 0.08)),
            (0.16, "NF-ResNet ablation (Brock 2021); batch 128 to 256 (Thakur)"),
        ),
        shares=(0.2, 0.5, 0.05),
        by_tensor=True,
    )

    exclude: Literal["auto"] | Texts = option("auto", "do not clip these; auto: heads' weights")
    units: OutputDims | None = option(None, "name the outputs, where a warning asks for it")
    eps: Positive = option(1e-3, "count a weight's norm as at least this, so that zeros can move")


@dataclass(eq=False)
class PerParameter(Mode):
    """Each tensor's gradient is scaled down to a norm of at most the threshold."""

    info = ModeInfo(
        "tensors", "‖g_p‖ of a tensor", "‖g_p‖", by_tensor=True, grid=(0.03, 0.1, 0.3, 1.0)
    )

    by: Literal["tensor", "block"] = option("tensor", "block: names with a prefix as blocks.3")

    @classmethod
    def waits_for(cls, options: Mapping[str, Any]) -> str:
        if options["by"] == "block":
            return "with clip.by=block needs all gradients of a block; use clip.by=tensor"
        return super().waits_for(options)


@dataclass(eq=False)
class AdaGC(Mode):
    """Each tensor's norm is limited to threshold x its own running mean (Wang 2025)."""

    info = ModeInfo(
        "tensors",
        "‖g_p‖/γ_p of a tensor",
        "γ_p",
        published=((1.05, "AdaGC (Wang 2025): GPT-2, LLaMA-2 and CLIP"),),
        grid=(1.02, 1.2, 1.5, 2.0),
        by_tensor=True,
    )
    at_once: ClassVar = {"threshold": 1.05, "warmup_steps": 1}
    unclipped: ClassVar = {"absolute": 1e30}

    absolute: Positive = option(1.0, "limit the norm of the whole gradient to this in the warm-up")
    beta: float = option(0.98, "weigh the steps before in the running mean of a norm", ge=0, lt=1)
    warmup_steps: Natural = option(100, "keep the smallest norm of each tensor in so many steps")
    history: Literal["clipped", "raw"] = option("clipped", "norms of the running mean")


@dataclass(eq=False)
class Percentile(Mode):
    """The gradient is scaled down to a percentile of all norms so far (Seetharaman 2020)."""

    info = ModeInfo(
        "steps",
        "‖G‖",
        "%",
        "Dashed: the percentile of the norms so far; norms above it are scaled down to it.",
        published=((10.0, "AutoClip (Seetharaman 2020)"),),
        follows="norms",
        tenth=90.0,
    )
    at_once: ClassVar = {"threshold": 10.0, "min_steps": 1}

    window: Count | None = option(None, "use so many of the latest steps; null: all")
    history: Literal["raw", "clipped"] = option("raw", "norms that the percentile is of")
    min_steps: Count = option(10, "clip from this step on; 1: as published")

    @classmethod
    def conflicts(cls, options: Mapping[str, Any]) -> Conflicts:
        if options["threshold"] > 100:
            yield "threshold", "is the percentile for clip=percentile: at most 100"
        window, least = options["window"], options["min_steps"]
        if window is not None and window < least:
            yield "window", f"never holds clip.min_steps={least} norms: use at least {least}"


@dataclass(eq=False)
class ZScore(Mode):
    """A gradient far above a running mean of the norms is scaled down (ZClip, Kumar 2025)."""

    info = ModeInfo(
        "steps",
        "‖G‖",
        "σ",
        "Dashed: mean + threshold · σ of the norms so far; norms above it are clipped.",
        published=((2.5, "ZClip (Kumar 2025)"),),
        grid=(2.0, 3.0, 4.0),
        follows="norms",
        tenth=1.3,
    )
    at_once: ClassVar = {"threshold": 0.01, "warmup_steps": 2}

    rule: Literal["adaptive_scaling", "mean", "percentile"] = option(
        "adaptive_scaling", "scale down to the mean, the limit, or nearer to the mean the larger"
    )
    decay: float = option(0.97, "weigh earlier steps in mean and variance", gt=0, lt=1)
    warmup_steps: Count = option(25, "start from so many steps, which are not clipped")
    history: Literal["raw", "clipped"] = option("clipped", "norms of mean and variance")
    eps: Positive = option(1e-6, "norms that vary by less of their mean are not clipped")


@dataclass(eq=False)
class Spike(Mode):
    """Elements are clamped where g² > threshold x their second moment (SPAM, Huang 2025)."""

    info = ModeInfo(
        "elements",
        "g²/v of an element",
        "g²/v",
        published=((5000.0, "SPAM (Huang 2025)"),),
        grid=(50.0, 500.0),
        shares=(0.0001, 0.01, 0.00001),
        by_tensor=True,
        needs_optimizer=True,
    )
    at_once: ClassVar = {"min_steps": 0}

    min_steps: Natural = option(20, "compare with a second moment of at least so many steps")


@dataclass(eq=False)
class Update(Mode):
    """The optimizer's update is limited, and no gradient changed (StableAdamW, Levanter)."""

    info = ModeInfo(
        "updates",
        "RMS of g/√v of a tensor",
        "RMS of g/√v",
        published=((1.0, "StableAdamW (Wortsman 2023)"),),
        grid=(1.5, 2.0, 4.0),
        shares=(0.02, 0.1, 0.005),
        by_tensor=True,
        needs_optimizer=True,
    )

    eps: Positive = option(1e-8, "count the root of a second moment as at least this")
