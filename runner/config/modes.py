"""The clipping modes by name: their options and facts, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError

from runner.config import section as t
from runner.config.mode import (
    COMMON,
    Mode,
    ModeInfo,
    checked,
    load,
    option,
    options_of,
    validated,
)
from runner.config.problem import did_you_mean, near_name
from runner.config.section import Conflicts, problems_of, refusal

__all__ = ["MODES", "NAMES", "Mode", "ModeInfo", "checked", "info_of", "load", "options_of"]

Dims = Annotated[dict[str, int | list[int]], Field(min_length=1)]
# A mode inside of another one; the second without a threshold, which the mode around it sets.
Inner = Annotated[Any, PlainValidator(lambda given: inner_mode(given) and given)]
InnerWithout = Annotated[
    Any, PlainValidator(lambda given: inner_mode(given, threshold=1.0) and given)
]


@dataclass(eq=False)
class Unclipped(Mode):
    """The gradient is measured, but not clipped."""

    info = ModeInfo(
        clips=None,
        stat="‖G‖",
        unit="‖G‖",
        note="These runs clip nothing.",
        by_tensor=True,
    )


@dataclass(eq=False)
class Norm(Mode):
    """The whole gradient is scaled down to a norm of at most the threshold (Pascanu 2013)."""

    info = ModeInfo(
        clips="steps",
        stat="‖G‖",
        unit="‖G‖",
        note="Dashed: the threshold; norms above it are scaled down to it.",
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
        clips="elements",
        stat="gradient element",
        unit="|g|",
        grid=(0.1, 0.25, 1.0, 2.0),
        shares=(0.01, 0.1, 0.001),
        by_tensor=True,
    )


@dataclass(eq=False)
class Adaptive(Mode):
    """Each unit's gradient is limited to threshold x the norm of its weight (Brock 2021)."""

    info = ModeInfo(
        clips="units",
        stat="‖G_u‖/‖W_u‖ of a unit",
        unit="‖W_u‖",
        published=((0.01, "NFNet (Brock 2021)"), (0.16, "NF-ResNet (Brock 2021), Thakur")),
        grid=(0.02, 0.04, 0.08),
        shares=(0.2, 0.5, 0.05),
        by_tensor=True,
    )

    exclude: Literal["auto"] | t.Texts = option("auto", "do not clip these; auto: heads' weights")
    units: Dims | None = option(None, "name the outputs, where a warning asks for it")
    eps: t.Positive = option(1e-3, "count a weight's norm as at least this, so that zeros can move")


@dataclass(eq=False)
class PerParameter(Mode):
    """Each tensor's gradient is scaled down to a norm of at most the threshold."""

    info = ModeInfo(
        clips="tensors",
        stat="‖g_p‖ of a tensor",
        unit="‖g_p‖",
        grid=(0.03, 0.1, 0.3, 1.0),
        by_tensor=True,
    )

    by: Literal["tensor", "block"] = option("tensor", "block: names with a prefix as blocks.3")


@dataclass(eq=False)
class AdaGC(Mode):
    """Each tensor's norm is limited to threshold x its own running mean (Wang 2025)."""

    info = ModeInfo(
        clips="tensors",
        stat="‖g_p‖/γ_p of a tensor",
        unit="γ_p",
        published=((1.05, "AdaGC (Wang 2025): GPT-2, LLaMA-2 and CLIP"),),
        grid=(1.02, 1.2, 1.5, 2.0),
        by_tensor=True,
    )
    at_once: ClassVar = {"threshold": 1.05, "warmup_steps": 1}
    unclipped: ClassVar = {"absolute": 1e30}

    absolute: t.Positive = option(1.0, "limit the norm of the gradient to this in the warm-up")
    beta: float = option(0.98, "weigh the steps before in the running mean of a norm", ge=0, lt=1)
    warmup_steps: t.Natural = option(100, "keep the smallest norm of each tensor in so many steps")
    history: Literal["clipped", "raw"] = option("clipped", "norms of the running mean")


@dataclass(eq=False)
class Percentile(Mode):
    """The gradient is scaled down to a percentile of all norms so far (Seetharaman 2020)."""

    info = ModeInfo(
        clips="steps",
        stat="‖G‖",
        unit="%",
        note="Dashed: the percentile of the norms; larger ones are clipped.",
        published=((10.0, "AutoClip (Seetharaman 2020)"),),
        follows="norms",
        tenth=90.0,
    )
    at_once: ClassVar = {"threshold": 10.0, "min_steps": 1}

    window: t.Count | None = option(None, "use so many of the latest steps; null: all")
    history: Literal["raw", "clipped"] = option("raw", "norms that the percentile is of")
    min_steps: t.Count = option(10, "clip from this step on; 1: as published")
    factor: t.Positive = option(
        1.0, "multiply the percentile by it; 2 of the median clips few steps"
    )

    def conflicts(self) -> Conflicts:
        """Yield a percentile above 100, and a window that holds too few norms to begin."""
        if self.threshold is not None and self.threshold > 100:
            yield "threshold", "is the percentile for clip=percentile: at most 100"
        least = self.min_steps
        if self.window is not None and self.window < least:
            yield "window", f"never holds clip.min_steps={least} norms: use at least {least}"


@dataclass(eq=False)
class ZScore(Mode):
    """A gradient far above a running mean of the norms is scaled down (ZClip, Kumar 2025)."""

    info = ModeInfo(
        clips="steps",
        stat="‖G‖",
        unit="σ",
        note="Dashed: mean + threshold · σ; norms above it are clipped.",
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
    warmup_steps: t.Count = option(25, "start from so many steps, which are not clipped")
    history: Literal["raw", "clipped"] = option("clipped", "norms of mean and variance")
    eps: t.Positive = option(1e-6, "norms that vary by less of their mean are not clipped")


@dataclass(eq=False)
class Spike(Mode):
    """Elements are clamped where g² > threshold x their second moment (SPAM, Huang 2025)."""

    info = ModeInfo(
        clips="elements",
        stat="g²/v of an element",
        unit="g²/v",
        published=((5000.0, "SPAM (Huang 2025)"),),
        grid=(50.0, 500.0),
        shares=(0.0001, 0.01, 0.00001),
        by_tensor=True,
        needs_optimizer=True,
    )
    at_once: ClassVar = {"min_steps": 0}

    min_steps: t.Natural = option(20, "compare with a second moment of at least so many steps")


@dataclass(eq=False)
class Update(Mode):
    """The optimizer's update is limited, and no gradient changed (StableAdamW, Levanter)."""

    info = ModeInfo(
        clips="updates",
        stat="RMS of g/√v of a tensor",
        unit="RMS of g/√v",
        published=((1.0, "StableAdamW (Wortsman 2023)"),),
        grid=(1.5, 2.0, 4.0),
        shares=(0.02, 0.1, 0.005),
        by_tensor=True,
        needs_optimizer=True,
    )

    eps: t.Positive = option(1e-8, "count the root of a second moment as at least this")


@dataclass(eq=False)
class Schedule(Mode):
    """Another mode clips, with a λ that depends on the number of the step (OLMo's warm-up)."""

    info = ModeInfo(
        clips="steps",
        stat="‖G‖",
        unit="‖G‖",
        note="Dashed: the threshold of each step.",
        follows="steps",
    )
    at_once: ClassVar = {"warmup_steps": 0}

    of: InnerWithout = option("norm", "clip by this mode; with options: {mode:adaptive,eps:1e-3}")
    warmup_steps: t.Natural = option(1000, "multiply it by warmup_factor in so many first steps")
    warmup_factor: t.Positive = option(10.0, "multiply the threshold by this in the first step")
    warmup: Literal["constant", "linear"] = option("constant", "end it at once, or in a line")
    decay: Literal["constant", "linear", "cosine"] = option("constant", "go on to end_factor")
    steps: t.Count | None = option(None, "let the decay take so many steps after the warm-up")
    end_factor: t.Positive = option(0.1, "multiply the threshold by this after the decay")

    def info_here(self) -> ModeInfo:
        """Return the facts about the mode that clips, whose λ follows the steps."""
        inner = inner_mode(self.of, threshold=1.0).info_here()
        note = type(self).info.note if inner.limits_norm else inner.note
        return replace(inner, follows=inner.follows or "steps", note=note)

    def conflicts(self) -> Conflicts:
        """Yield a mode without a threshold of its own, and a decay without an end."""
        if isinstance(inner_mode(self.of, threshold=self.threshold), Schedule):
            yield "of", "has no threshold of its own that a schedule could set"
        if self.decay != "constant" and self.steps is None:
            yield "steps", f"clip.decay={self.decay} needs the number of its steps"


@dataclass(eq=False)
class Chain(Mode):
    """Several modes in order: each clips what the one before has left."""

    info = ModeInfo(stat="value that each link compares with its threshold", nested="links")

    links: list[Inner] = option(list, "clip by these modes, one after the other", min_length=1)


@dataclass(eq=False)
class ByGroups(Mode):
    """Each group of parameters is measured and clipped by itself, by a mode of its own."""

    info = ModeInfo(
        clips="groups", stat="value that each group compares with its λ", nested="groups"
    )

    groups: dict[str, Inner] = option(dict, "patterns of names, each with a mode", min_length=1)


MODES: Mapping[str, type[Mode]] = {
    "adagc": AdaGC,
    "adaptive": Adaptive,
    "chain": Chain,
    "groups": ByGroups,
    "none": Unclipped,
    "norm": Norm,
    "per_parameter": PerParameter,
    "percentile": Percentile,
    "schedule": Schedule,
    "spike": Spike,
    "update": Update,
    "value": Value,
    "zscore": ZScore,
}
"""The modes by name, which is also the name of a file in ``conf/clip``."""

NAMES = tuple(MODES)


def info_of(name: str, recorded: Mapping[str, Any] | None = None) -> ModeInfo:
    """Return the facts about a mode, for readers of a run that cannot import a user's mode."""
    with suppress(ValidationError):  # a damaged file
        if recorded is not None:
            return TypeAdapter(ModeInfo).validate_python(recorded)
    return MODES[name].info if name in MODES else ModeInfo()


def class_of(given: Mapping[str, Any]) -> type[Mode]:
    """Return the class that ``mode`` or ``_target_`` names, with a refusal as `inner_mode` has."""
    kind = given.get("mode")
    target = given.get("_target_")
    if target is None:
        if kind in NAMES:
            return MODES[str(kind)]
        text = f"must be one of {', '.join(NAMES)}{did_you_mean(kind, NAMES)}"
        raise refusal([("mode", text, kind, near_name(kind, NAMES))])
    try:
        return load(target if isinstance(target, str) else "")
    except ValueError as error:
        raise refusal([("_target_", str(error), target)]) from error


def inner_mode(value: Any, **outer: Any) -> Mode:
    """Return a mode inside of another one.

    The refusal names options that are wrong, also beside ``outer``, which the mode around it sets.
    """
    described = _spelled_out(value)
    kind = class_of(described)
    options: dict[str, Any] = {}
    problems: list[tuple[Any, ...]] = []
    for name, option_value in described.items():
        if name in outer or name in COMMON:
            problems.append((name, "is set around this mode", option_value))
        elif name not in ("mode", "_target_"):
            options[name] = option_value
    if kind.info.needs_optimizer:
        text = "limits what the optimizer does: no mode can hold it"
        problems.append(("mode", text, described.get("mode")))
    options |= outer
    mode = Mode()
    try:
        mode = validated(kind, options)
    except ValidationError as error:
        for problem in problems_of(error.errors(), options_of(kind), options):
            problems.append((problem.key, problem.message, problem.value, problem.suggestion))
    if problems:
        raise refusal(problems)
    return mode


def _spelled_out(value: Any) -> Mapping[str, Any]:
    """Return what describes a mode, which may be a number, a name or nothing in short."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"mode": "norm", "threshold": value}
    if value is None or isinstance(value, str):
        return {"mode": value or "none"}
    if isinstance(value, Mapping):
        return value
    raise ValueError("must be a mode, such as {mode:norm,threshold:1.0}, or a number or none")
