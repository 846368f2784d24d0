"""The clipping modes of this project by name, and those that hold other modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from runner.config import simple_modes as simple
from runner.config.mode import Mode, ModeError, ModeInfo, load, option, options_of
from runner.config.problem import MISSING, did_you_mean, or_list, unknown_key
from runner.config.simple_modes import Conflicts
from runner.config.values import (
    CONFIG,
    Allowed,
    Count,
    Natural,
    Positive,
    Refusal,
    TargetMapping,
    allowed,
)

__all__ = ["MODES", "NAMES", "Mode", "ModeError", "ModeInfo", "built_in", "info_of", "load"]
__all__ += ["options_of"]

Found = tuple[str, str, Any]
"""An option below ``clip``, what is wrong with it, and its value."""

_CONFIG = ConfigDict(CONFIG, validate_default=True)  # type: ignore[misc]
_THRESHOLD = "a finite number greater than 0"
_OF_THE_WHOLE = (
    "norm_type",
    "nonfinite",
    "max_skips",
    "scales",
    "skip",
    "what_if",
    "when",
    "step_in_backward",
)


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

    of: Annotated[
        str | dict[str, Any],
        Allowed("the name of a mode, or a mapping such as {mode:adaptive,eps:1e-3}"),
    ] = option("norm", "clip by this mode; with options: {mode:adaptive,eps:1e-3}")
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

    links: Annotated[
        list[Any],
        Field(
            min_length=1,
            description="clip by these modes, one after the other; each has a mode, a threshold, "
            "and options of this mode",
        ),
        Allowed("a list of modes, such as [{mode:value,threshold:0.5},{mode:norm,threshold:1.0}]"),
    ] = field(default_factory=list)

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

    groups: Annotated[
        dict[str, Any],
        Field(
            min_length=1,
            description="clip parameters by patterns of their names: each has a mode with its "
            "threshold and options, a limit of the norm, or none; the first match counts",
        ),
        Allowed(
            "patterns of parameter names, each with a mode, a limit of the norm, or none, such as "
            "{head.*:none,*.attn.*:0.5,*:{mode:norm,threshold:1.0}}"
        ),
    ] = field(default_factory=dict)

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
    return built_in(kind) if isinstance(kind, str) else kind


def arguments_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a mode that is written out."""
    return {key: value for key, value in node.items() if key not in ("mode", "_target_")}


def problems(where: str, given: Any, outer: Mapping[str, Any] | None = None) -> Iterator[Found]:
    """Yield what is wrong with a mode inside of another one."""
    outer = outer or {}
    node = written_out(given)
    if not isinstance(node, Mapping):
        yield where, "must be a mode, such as {mode:norm,threshold:1.0}, or a number or none", given
        return
    mode, target = node.get("mode", MISSING), node.get("_target_")
    if target is None and mode not in NAMES:
        must = f"must be one of {', '.join(NAMES)}"
        hint = f"no value given; {must}" if mode == MISSING else must + did_you_mean(mode, NAMES)
        yield f"{where}.mode", hint, mode
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
    options = {**own, **outer}
    checked = _model(described)  # type: ignore[arg-type]
    try:
        made = checked.model_validate({k: v for k, v in options.items() if v != MISSING})
    except ValidationError as error:
        found = {str(one["loc"][0]): one for one in error.errors(include_url=False)}
        for name, one in found.items():
            value = options.get(name, MISSING)
            yield f"{where}.{name}", _message(where, described, checked, name, one, value), value
        return
    yield from _conflicts(where, described, {name: getattr(made, name) for name in _own(checked)})


def _conflicts(where: str, described: type[Mode], options: dict[str, Any]) -> Iterator[Found]:
    """Yield options that are right one by one, but not together."""
    threshold, name = options["threshold"], _name(described)
    if described.info.needs_optimizer:
        message = (
            f"limits what the optimizer does, so it is no part of another mode: use clip={name}"
        )
        yield f"{where}.mode", message, name
        return
    if threshold is not None and not described.info.takes_threshold:
        yield f"{where}.threshold", f"mode {name} takes no threshold", threshold
    elif threshold is None and described.info.takes_threshold:
        yield f"{where}.threshold", f"mode {name} needs {_THRESHOLD}", MISSING
    else:
        for key, message, *value in described.conflicts(options):
            own = value[0] if value else options.get(key, MISSING)
            yield f"{where}.{key}", message, own


def _message(
    where: str, described: type[Mode], checked: type[BaseModel], name: str, one: Any, value: Any
) -> str:
    """Return what is wrong with one option, given pydantic's error."""
    if one["type"] == "extra_forbidden":
        if name in _OF_THE_WHOLE:
            return f"is the same for all modes inside of one: set clip.{name}"
        known = _own(checked)
        choices = [each for each in NAMES if name in options_of(built_in(each))]
        if choices and not did_you_mean(name, known):
            return f"is an option of mode {or_list(choices)}"
        place = f"clip.{where}"
        return unknown_key(f"{place}.{name}", [f"{place}.{each}" for each in known]).message
    field, cause = checked.model_fields[name], one.get("ctx", {}).get("error")
    may = allowed(field.annotation, field.metadata)
    if value == MISSING:
        return f"no value given; must be {may.text} ({field.description})"
    if isinstance(cause, Refusal):
        return str(cause)
    return f"must be {may.text}{did_you_mean(value, may.names)}"


def _own(checked: type[BaseModel]) -> list[str]:
    return list(checked.model_fields)


def _name(described: type[Mode]) -> str:
    named = (name for name in NAMES if built_in(name) is described)
    return next(named, described.__name__)


@cache
def _model(described: type[Mode]) -> type[BaseModel]:
    """Return the model of a mode's options, whose defaults are those of its class."""
    fields: dict[str, Any] = {
        name: (one.hint, one.default) for name, one in options_of(described).items()
    }
    made: type[BaseModel] = create_model(
        "Nested", __config__=_CONFIG, threshold=(Positive | None, described.threshold), **fields
    )
    return made
