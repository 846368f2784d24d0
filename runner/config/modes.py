"""The clipping modes of this project by name, and those that hold other modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ValidationError, create_model

from runner.config import simple_modes as simple
from runner.config.mode import Mode, ModeError, ModeInfo, load, option, options_of
from runner.config.problem import MISSING, did_you_mean, unknown_key
from runner.config.section import CONFIG, Count, Natural, Positive, TargetMapping, sentences
from runner.config.simple_modes import Conflicts

__all__ = ["MODES", "NAMES", "Mode", "ModeError", "ModeInfo", "built_in", "info_of", "load"]
__all__ += ["options_of"]

_OF_THE_WHOLE = ("norm_type", "nonfinite", "max_skips", "scales", "skip", "what_if", "when")


@dataclass(eq=False)
class Schedule(Mode):
    """Another mode clips, with a λ that depends on the number of the optimizer step."""

    info = ModeInfo(
        stat="‖G‖",
        unit="‖G‖",
        note="Dashed: the threshold of each step; norms above it are clipped.",
        follows="steps",
        sources=("https://github.com/allenai/OLMo, grad_clip_warmup_factor",),
    )
    at_once: ClassVar = {"warmup_steps": 0}

    of: str | dict[str, Any] = option(
        "norm", "clip by this mode; with options: {mode:adaptive,eps:1e-3}"
    )
    warmup_steps: Natural = option(
        1000, "multiply the threshold by warmup_factor in so many first steps"
    )
    warmup_factor: Positive = option(10.0, "multiply the threshold by this in the first step")
    warmup: Literal["constant", "linear"] = option(
        "constant",
        "constant: keep the factor until the warm-up ends, then use the threshold at once; linear: "
        "go there in a line",
    )
    decay: Literal["constant", "linear", "cosine"] = option(
        "constant", "change the threshold after the warm-up, in a line or by half a cosine"
    )
    steps: Count | None = option(
        None, "let the decay take so many steps, counted from the end of the warm-up"
    )
    end_factor: Positive = option(0.1, "multiply the threshold by this after the decay")
    scheduler: TargetMapping | None = option(
        None,
        "take the shape of this scheduler of learning rates instead, such as "
        "{_target_:torch.optim.lr_scheduler.ExponentialLR,gamma:0.99}",
    )

    @classmethod
    def waits_for(cls, options: Mapping[str, Any]) -> str:
        """Return why a schedule waits: it sets λ step by step."""
        return "sets the threshold of another mode, which then clips after the backward pass"

    @classmethod
    def info_with(cls, options: Mapping[str, Any]) -> ModeInfo:
        """Return the facts about the mode that clips, whose λ moves."""
        node = written_out(options["of"])
        inner = described_of(node).info_with(arguments_of(node))
        note = cls.info.note if inner.limits_norm else inner.note
        return replace(inner, follows=inner.follows or "steps", note=note)

    @classmethod
    def conflicts(cls, options: Mapping[str, Any]) -> Conflicts:
        """Yield wrong options of the mode that clips, and shapes that exclude each other."""
        found = [*problems("of", options["of"], {"threshold": options["threshold"]})]
        if not any(key in ("of", "of.mode", "of._target_") for key, *_ in found):
            kind = described_of(written_out(options["of"]))
            if issubclass(kind, Schedule) or not kind.info.takes_threshold:
                message = "has no threshold of its own that a schedule could set"
                found = [("of", message, options["of"])]
        yield from found
        decays, shaped = options["decay"] != "constant", options["scheduler"] is not None
        if decays and options["steps"] is None and not shaped:
            yield "steps", f"clip.decay={options['decay']} needs the number of its steps"
        if shaped and (decays or options["warmup_steps"]):
            yield "scheduler", "takes the place of clip.warmup_steps (use 0) and clip.decay"


@dataclass(eq=False)
class Chain(Mode):
    """Several modes in order: each clips what the one before has left."""

    info = ModeInfo(
        stat="value that each link compares with its threshold",
        note="The thresholds of a chain are those of its links, and none is drawn.",
        nested="links",
    )

    links: list[Any] = option(
        list,
        "clip by these modes, one after the other; each has a mode, a threshold, and options of "
        "this mode",
        min_length=1,
    )

    @classmethod
    def conflicts(cls, options: Mapping[str, Any]) -> Conflicts:
        """Yield what is wrong with each link."""
        for number, link in enumerate(options["links"]):
            yield from problems(f"links.{number}", link)


@dataclass(eq=False)
class ByGroups(Mode):
    """Each group of parameters is measured and clipped by itself, by a mode of its own."""

    info = ModeInfo(
        clips="groups",
        stat="value that each group compares with its threshold",
        note="The thresholds are those of the groups, not of ‖G‖, and none is drawn.",
        nested="groups",
    )

    groups: dict[str, Any] = option(
        dict,
        "clip parameters by patterns of their names: each has a mode with its threshold and "
        "options, a limit of the norm, or none; the first match counts",
        min_length=1,
    )

    @classmethod
    def conflicts(cls, options: Mapping[str, Any]) -> Conflicts:
        """Yield what is wrong with each group."""
        for pattern, mode in options["groups"].items():
            yield from problems(f"groups.{pattern}", mode)


MODES: Mapping[str, type[Mode]] = {
    "adagc": simple.AdaGC,
    "adaptive": simple.Adaptive,
    "chain": Chain,
    "groups": ByGroups,
    "none": simple.Unclipped,
    "norm": simple.Norm,
    "per_parameter": simple.PerParameter,
    "percentile": simple.Percentile,
    "schedule": Schedule,
    "spike": simple.Spike,
    "update": simple.Update,
    "value": simple.Value,
    "zscore": simple.ZScore,
}
"""The modes by name: those of the files in ``conf/clip``."""

NAMES = tuple(MODES)


def built_in(name: str) -> type[Mode]:
    """Return the description of the mode called ``name``."""
    return MODES[name]


def info_of(name: str, recorded: Mapping[str, Any] | None = None) -> ModeInfo:
    """Return the facts about a mode, for readers of a run that cannot import a user's mode."""
    if recorded is not None:
        return ModeInfo.of_record(recorded)
    return MODES[name].info if name in MODES else ModeInfo()


def written_out(node: Any) -> Any:
    """Return a mode as a mapping: a number is a limit of the norm, a name is that of a mode."""
    if isinstance(node, int | float) and not isinstance(node, bool):
        return {"mode": "norm", "threshold": node}
    if node is None or isinstance(node, str):
        return {"mode": node or "none"}
    return node


def kind_of(node: Mapping[str, Any]) -> type[Mode] | str:
    """Return the name of a mode that is written out, or the user's class."""
    target = node.get("_target_")
    return str(node["mode"]) if target is None else load(str(target))


def described_of(node: Mapping[str, Any]) -> type[Mode]:
    """Return the description of a mode that is written out, or the user's class."""
    kind = kind_of(node)
    return MODES[kind] if isinstance(kind, str) else kind


def arguments_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a mode that is written out."""
    return {key: value for key, value in node.items() if key not in ("mode", "_target_")}


def problems(where: str, given: Any, outer: Mapping[str, Any] | None = None) -> Conflicts:
    """Yield what is wrong with a mode inside of another one: option below clip, why, its value."""
    node, outer = written_out(given), outer or {}
    if not isinstance(node, Mapping):
        yield where, "must be a mode, such as {mode:norm,threshold:1.0}, or a number or none", given
        return
    mode, target = node.get("mode", MISSING), node.get("_target_")
    if target is None and mode not in NAMES:
        text = f"must be one of {', '.join(NAMES)}{did_you_mean(mode, NAMES)}"
        yield f"{where}.mode", text, mode
        return
    try:
        described = described_of(node)
    except ModeError as error:
        yield f"{where}._target_", str(error), target
        return
    own = arguments_of(node)
    if twice := next((name for name in outer if name in own), None):
        yield f"{where}.{twice}", f"is that of the mode around it: set clip.{twice}", own[twice]
        return
    options = {key: value for key, value in {**own, **outer}.items() if value != MISSING}
    checked = _model(described)  # type: ignore[arg-type]
    if unknown := [name for name in own if name not in checked.model_fields]:
        known = [f"clip.{where}.{name}" for name in checked.model_fields]
        for name in unknown:
            same = name in _OF_THE_WHOLE
            text = f"is the same for all modes inside of one: set clip.{name}"
            key = f"{where}.{name}"
            yield key, text if same else unknown_key(f"clip.{key}", known).message, own[name]
        return
    try:
        made = checked.model_validate(options)
    except ValidationError as error:
        for name, text in sentences(error).items():
            yield f"{where}.{name}", text, options.get(name, MISSING)
        return
    yield from _conflicts(where, described, dict(made))


def _conflicts(where: str, described: type[Mode], options: dict[str, Any]) -> Conflicts:
    threshold = options["threshold"]
    name = next((key for key, one in MODES.items() if one is described), described.__name__)
    if described.info.needs_optimizer:
        text = f"limits what the optimizer does, so it is no part of another mode: use clip={name}"
        yield f"{where}.mode", text, name
    elif threshold is not None and not described.info.takes_threshold:
        yield f"{where}.threshold", f"mode {name} takes no threshold", threshold
    elif threshold is None and described.info.takes_threshold:
        yield f"{where}.threshold", f"mode {name} needs a finite number greater than 0", MISSING
    else:
        for key, message, *value in described.conflicts(options):
            yield f"{where}.{key}", message, value[0] if value else options.get(key, MISSING)


@cache
def _model(described: type[Mode]) -> type[BaseModel]:
    """Return the model of a mode's options, whose defaults are those of its class."""
    fields: dict[str, Any] = {
        name: (one.hint, one.default) for name, one in options_of(described).items()
    }
    made: type[BaseModel] = create_model(
        "Nested", __config__=CONFIG, threshold=(Positive | None, described.threshold), **fields
    )
    return made
