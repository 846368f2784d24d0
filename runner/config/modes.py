"""The clipping modes by name, those that hold other modes, and the pydantic model of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator, TypeAdapter, ValidationError, create_model
from pydantic_core import to_jsonable_python

from runner.config import section as t
from runner.config import simple_modes as simple
from runner.config.mode import Conflicts, Mode, ModeError, ModeInfo, load, option, options_of
from runner.config.problem import MISSING, NOTHING, did_you_mean, unknown_key
from runner.config.section import Conflict, Section, conflicts_of, key, refusal

__all__ = ["MODES", "NAMES", "Mode", "ModeError", "ModeInfo", "info_of", "load", "options_of"]


Inner = Annotated[Any, PlainValidator(lambda given: checked(given))]
"""A mode inside of another one: a number is a limit of the norm, a text the name of a mode."""
InnerWithout = Annotated[Any, PlainValidator(lambda given: checked(given, threshold=1.0))]
"""The same without a threshold, which the mode around it sets."""


@dataclass(eq=False)
class Schedule(Mode):
    """Another mode clips, with a λ that depends on the number of the step (OLMo's warm-up)."""

    info = ModeInfo("steps", "‖G‖", "‖G‖", "Dashed: the threshold of each step.", follows="steps")
    at_once: ClassVar = {"warmup_steps": 0}

    of: InnerWithout = option("norm", "clip by this mode; with options: {mode:adaptive,eps:1e-3}")
    warmup_steps: t.Natural = option(1000, "multiply it by warmup_factor in so many first steps")
    warmup_factor: t.Positive = option(10.0, "multiply the threshold by this in the first step")
    warmup: Literal["constant", "linear"] = option("constant", "end it at once, or in a line")
    decay: Literal["constant", "linear", "cosine"] = option("constant", "go on to end_factor")
    steps: t.Count | None = option(None, "let the decay take so many steps after the warm-up")
    end_factor: t.Positive = option(0.1, "multiply the threshold by this after the decay")

    @classmethod
    def waits_for(cls, options: Mapping[str, Any]) -> str:
        return "sets the threshold of another mode, which then clips after the backward pass"

    @classmethod
    def info_with(cls, options: Mapping[str, Any]) -> ModeInfo:
        kind, own = inner_mode(options["of"], threshold=1.0)
        inner = described_by(kind).info_with(own)
        note = cls.info.note if inner.limits_norm else inner.note
        return replace(inner, follows=inner.follows or "steps", note=note)

    @classmethod
    def conflicts(cls, options: Mapping[str, Any]) -> Conflicts:
        kind, own = inner_mode(options["of"], threshold=1.0)
        described = described_by(kind)
        if issubclass(described, Schedule):
            yield "of", "has no threshold of its own that a schedule could set"
        else:
            usual = {name: default for name, (_, default) in options_of(described).items()}
            yield from described.conflicts({**usual, **own, "threshold": options["threshold"]})
        if options["decay"] != "constant" and options["steps"] is None:
            yield "steps", f"clip.decay={options['decay']} needs the number of its steps"


@dataclass(eq=False)
class Chain(Mode):
    """Several modes in order: each clips what the one before has left."""

    info = ModeInfo(stat="value that each link compares with its threshold", nested="links")

    links: list[Inner] = option(list, "clip by these modes, one after the other", min_length=1)


@dataclass(eq=False)
class ByGroups(Mode):
    """Each group of parameters is measured and clipped by itself, by a mode of its own."""

    info = ModeInfo("groups", "value that each group compares with its λ", nested="groups")

    groups: dict[str, Inner] = option(dict, "patterns of names, each with a mode", min_length=1)


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


@cache
def _reader() -> TypeAdapter[ModeInfo]:
    return TypeAdapter(ModeInfo)


def info_of(name: str, recorded: Mapping[str, Any] | None = None) -> ModeInfo:
    """Return the facts about a mode, for readers of a run that cannot import a user's mode."""
    if recorded is not None:
        return _reader().validate_python(recorded)
    return MODES[name].info if name in MODES else ModeInfo()


# -- models


class ModeOptions(Section):
    """The model of every mode; that of each one has its options as further fields."""

    described: ClassVar[type[Mode]] = Mode

    threshold: t.Positive | None = key("lower it to clip more; `calibrate` suggests one")

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("threshold", *options_of(self.described))}

    def conflicts(self) -> Iterator[Conflict]:
        info, name = self.described.info, name_of(self.described)
        if self.threshold is None and info.takes_threshold:
            yield Conflict("threshold", f"clip={name} needs a finite number greater than 0")
        elif self.threshold is not None and not info.takes_threshold:
            why = f"has its thresholds in clip.{info.nested}" if info.nested else "clips nothing"
            yield Conflict("threshold", f"clip={name} {why}, so it takes no threshold")
        else:
            yield from (Conflict(*each) for each in self.described.conflicts(self.options))


@cache
def model_of(described: type[Mode], base: type[ModeOptions], defaults: bool) -> Any:
    """Return the model of a mode; without ``defaults``, which are in ``conf/``, for one of ours."""
    try:
        fields: dict[str, Any] = {
            name: (hint, default if defaults else ...)
            for name, (hint, default) in options_of(described).items()
        }
        made: Any = create_model(described.__name__, __base__=base, **fields)
        made.model_rebuild()
    except Exception as error:  # pydantic raises several kinds for types that it cannot check
        raise ModeError(f"the types of its options cannot be checked: {error}") from error
    made.described = described
    return made


def name_of(described: type[Mode]) -> str:
    return next((name for name, one in MODES.items() if one is described), described.__name__)


def described_by(kind: str | type[Mode]) -> type[Mode]:
    """Return the description of the mode of this name, or the user's class itself."""
    return MODES[kind] if isinstance(kind, str) else kind


def checked(given: Any, **outer: Any) -> Any:
    inner_mode(given, **outer)
    return given


def check_options(described: type[Mode], options: Mapping[str, Any]) -> None:
    """Raise a ValueError that names what is wrong with the options of a mode."""
    model = model_of(described, ModeOptions, True)  # type: ignore[arg-type]
    defaults = {name: default for name, (_, default) in options_of(described).items()}
    try:
        # Tuples are lists there.
        model.model_validate(to_jsonable_python({**defaults, **options}))
    except ValidationError as error:
        known = {"threshold", *options_of(described)}
        found = [f"{one.key} {one.message}" for one in conflicts_of(error.errors(), known)]
        raise ValueError("; ".join(found)) from None


def inner_mode(given: Any, **outer: Any) -> tuple[str | type[Mode], dict[str, Any]]:
    """Return the name or the class of a mode inside of another one, and its options.

    Raises:
        ValueError: an option is wrong, also beside ``outer``, which the mode around it sets.
    """
    if isinstance(given, int | float) and not isinstance(given, bool):
        given = {"mode": "norm", "threshold": given}
    elif given is None or isinstance(given, str):
        given = {"mode": given or "none"}
    elif not isinstance(given, Mapping):
        raise ValueError("must be a mode, such as {mode:norm,threshold:1.0}, or a number or none")
    own = {name: value for name, value in given.items() if name not in ("mode", "_target_")}
    kind: str | type[Mode] = given.get("mode", MISSING)
    if (target := given.get("_target_")) is not None:
        try:
            kind = load(str(target))
        except ModeError as error:
            raise refusal([Conflict("_target_", str(error), target)]) from error
    elif kind not in NAMES:
        text = f"must be one of {', '.join(NAMES)}{did_you_mean(kind, NAMES)}"
        raise refusal([Conflict("mode", text, kind)])
    described = described_by(kind)
    known, around = {"threshold", *options_of(described)} - outer.keys(), "is set around this mode"
    found = [
        Conflict(name, around if name in outer else unknown_key(name, known).message, value)
        for name, value in own.items()
        if name not in known
    ]
    if described.info.needs_optimizer:
        found.append(Conflict("mode", "limits what the optimizer does: no mode can hold it", kind))
    model = model_of(described, ModeOptions, True)  # type: ignore[arg-type]
    try:
        model.model_validate({"threshold": described.threshold, **own, **outer})
    except ValidationError as error:
        for one in conflicts_of(error.errors(), known):
            value = own.get(one.key, MISSING) if one.value is NOTHING else one.value
            found.append(one._replace(value=value))
    if found:
        raise refusal(found)
    return kind, own
