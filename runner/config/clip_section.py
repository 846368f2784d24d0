"""Section ``clip``: how the gradient of each optimizer step is clipped.

All modes share the keys of :class:`Clip`. A mode adds its own options, which it declares as fields
of its description (see :mod:`runner.config.mode`): one model is made of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, create_model, model_validator

from runner.config.mode import Mode, ModeError, ModeInfo, load, options_of
from runner.config.modes import MODES, NAMES
from runner.config.problem import did_you_mean, or_list
from runner.config.section import (
    Conflict,
    Count,
    DottedName,
    NormOrder,
    OneOf,
    Positive,
    Positives,
    Section,
    Text,
)

ACCEPT_AFTER = 20
"""Skips in a row after which a higher level counts as the new one, by default."""

WINDOW = 128
"""Number of kept steps that ``sigma`` compares with by default."""

_K = {"sigma": 6.0, "ema": 20.0}


@dataclass(eq=False)
class SkipOptions:
    """When an optimizer step is skipped because a value of it is a spike."""

    rule: str = "sigma"
    of: str = "norm"
    k: float | None = None
    window: int | None = None
    decay: float | None = None
    min_steps: int | None = None
    accept_after: int | None = ACCEPT_AFTER

    def __post_init__(self) -> None:
        for name, message in problems(vars(self)):
            raise ValueError(f"{name}={getattr(self, name)} of a skip rule {message}")
        self.k = _K[self.rule] if self.k is None else self.k
        if self.rule == "sigma":
            self.window = WINDOW if self.window is None else self.window
            shortest = max(2, self.window // 2)
        else:
            self.decay = 0.99 if self.decay is None else self.decay
            shortest = max(1, round(1 / (1 - self.decay)))
        self.min_steps = shortest if self.min_steps is None else self.min_steps

    @property
    def of_what(self) -> str:
        """The value that the rule judges, for messages."""
        names = {"norm": "norm of the gradient", "loss": "loss"}
        return names.get(self.of, "loss or the norm of the gradient")


def problems(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the options that cannot be, each with why, before defaults are filled in."""
    for name, allowed in (("rule", ("sigma", "ema")), ("of", ("norm", "loss", "either"))):
        if given[name] not in allowed:
            yield name, f"must be {or_list(allowed)}{did_you_mean(given[name], allowed)}"
    decay, window, accept_after = given["decay"], given["window"], given["accept_after"]
    if given["k"] is not None and not given["k"] > 0:
        yield "k", "must be above 0"
    if accept_after is not None and accept_after < 1:
        yield "accept_after", "must be at least 1, or null for never"
    if given["rule"] == "sigma":
        if decay is not None:
            yield "decay", "goes with the rule ema; the memory of sigma is its window"
        if window is not None and window < 2:
            yield "window", "must be at least 2"
        most = WINDOW if window is None else window
        if given["min_steps"] is not None and not 2 <= given["min_steps"] <= most:
            yield "min_steps", f"must be from 2 to the window of {most} steps"
    else:
        if window is not None:
            yield "window", "goes with the rule sigma; the memory of ema is its decay"
        if decay is not None and not 0 < decay < 1:
            yield "decay", "must be above 0 and below 1"
        if given["min_steps"] is not None and given["min_steps"] < 1:
            yield "min_steps", "must be at least 1"


class Skip(Section):
    """Whole optimizer steps that are left out because their loss or gradient norm is a spike."""

    rule: Literal["sigma", "ema"] | None = Field(
        default=None,
        description="skip a step that is a spike: above mean + k standard deviations of the last "
        "kept steps (sigma), or above k times their moving average (ema); null: skip none",
    )
    of: Literal["norm", "loss", "either"] = Field(
        default="norm",
        description="choose what is judged: the gradient norm before clipping, the loss, or both",
    )
    k: Positive | None = Field(
        default=None, description="lower it to skip more; null: 6 (sigma), 20 (ema)"
    )
    window: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="compare with this many kept steps (sigma); null: 128"
    )
    decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="weigh the past of the moving average (ema); null: 0.99"
    )
    min_steps: Count | None = Field(
        default=None,
        description="skip nothing before so many kept steps; null: half of window (sigma), "
        "1/(1 - decay) (ema)",
    )
    accept_after: Count | None = Field(
        default=ACCEPT_AFTER,
        description="accept a higher level that lasts: start the history anew after so many skips "
        "in a row, which clip.max_skips counts too; null: never",
    )

    @property
    def options(self) -> dict[str, Any] | None:
        """Arguments that make the rule; None if nothing is skipped."""
        return None if self.rule is None else dict(self)

    @model_validator(mode="before")
    @classmethod
    def _of_rule(cls, given: Any) -> Any:
        """Read ``skip: sigma`` and ``skip: null`` of a file, which give the rule alone."""
        return {"rule": given} if given is None or isinstance(given, str) else given

    def conflicts(self) -> Iterator[Conflict]:
        """Yield the options that no rule reads, or that the chosen one does not."""
        if self.rule is not None:
            yield from (Conflict(key, message) for key, message in problems(dict(self)))
            return
        for key, field in type(self).model_fields.items():
            if getattr(self, key) != field.default:
                message = "is used with a rule alone: add clip.skip=sigma or clip.skip=ema"
                yield Conflict(key, message)


class Clip(Section):
    """How the gradient of each optimizer step is clipped."""

    described: ClassVar[type[Mode]] = Mode

    mode: Annotated[str, OneOf(NAMES)] = Field(
        description="choose what is clipped: the norm of the whole gradient, each element, each "
        "unit, or nothing"
    )
    threshold: Positive | None = Field(
        description="clip what is larger than this; lower it to clip more; "
        "`python -m runner calibrate` suggests a value"
    )
    norm_type: NormOrder = Field(
        description="measure this norm of the gradient: 1, 2 or inf; change it only to reproduce "
        "a paper that does"
    )
    nonfinite: Literal["skip", "error", "ignore"] = Field(
        description="choose what to do with a step whose gradient is not finite: leave it out, end "
        "the run, or take it"
    )
    max_skips: Count | None = Field(
        description="end the run with an error when so many steps in a row were skipped because "
        "their gradient was not finite; null: never"
    )
    # With a default, unlike other keys: files of users, and runs recorded earlier, lack them.
    scales: Literal["auto", "all"] = Field(
        default="auto",
        description="choose which gradients a coefficient multiplies, and whose norm is compared "
        "with the threshold; auto: all but the matrices of Muon, which divides by their norm "
        "itself; all: every gradient",
    )
    when: Literal["step", "backward"] = Field(
        default="step",
        description="clip before the optimizer step, or each gradient in the backward pass, as "
        "soon as it is final, with modes that need no other gradient",
    )
    step_in_backward: bool = Field(
        default=False,
        description="let the optimizer step each parameter in the backward pass too, which then "
        "holds one gradient at a time; needs clip.when=backward and clip.nonfinite=error",
    )
    skip: Skip = Field(
        default=Skip(), description="leave out whole steps whose loss or gradient norm is a spike"
    )
    what_if: Positives = Field(
        description="try further thresholds: log the share of steps that each would have clipped"
    )

    @property
    def own_target(self) -> str | None:
        """Full name of the class, where the mode is a user's own."""
        return getattr(self, "target", None)

    @property
    def kind(self) -> str | type[Mode]:
        """Name of the mode, or the user's own class."""
        return self.mode if self.own_target is None else self.described

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that make the mode: those of all modes, and options of its own."""
        names = ("threshold", "norm_type", "scales", *options_of(self.described))
        return {name: getattr(self, name) for name in names}

    @property
    def info(self) -> ModeInfo:
        """Facts about the mode with these options."""
        return self.described.info_with(self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class of a mode is made when it is first asked for, so pickle cannot find it by name.
        return _restore, (self.mode, self.own_target, self.__getstate__())

    def conflicts(self) -> Iterator[Conflict]:
        """Yield keys that are not used, a threshold that is missing, and conflicts of the mode."""
        for conflict in self.skip.conflicts():
            yield Conflict(f"skip.{conflict.key}", conflict.message)
        info = self.described.info
        if self.scales == "all" and info.parts is not None:
            message = f"clip={self.mode} multiplies no gradients by one coefficient; use auto"
            yield Conflict("scales", message)
        if self.threshold is not None and not info.takes_threshold:
            why = f"has its thresholds in clip.{info.nested}" if info.nested else "clips nothing"
            yield Conflict("threshold", f"clip={self.mode} {why}, so it takes no threshold")
        if self.what_if and info.nested:
            message = f"clip={self.mode} has several thresholds, so that no single one can be tried"
            yield Conflict("what_if", message)
        if info.takes_threshold and self.threshold is None:
            message = f"clip={self.mode} needs a finite number greater than 0; or clip=none"
            yield Conflict("threshold", message)
            return
        found = [Conflict(*each) for each in self.described.conflicts(self.options)]
        yield from found
        if self.what_if and not found and self.info.derived:
            message = (
                f"clip={self.mode} derives its limit from earlier steps, so no fixed threshold can "
                "be tried beside it; leave it empty, or use clip=norm"
            )
            yield Conflict("what_if", message)


class _OwnClip(Clip):
    mode: Text = Field(description="name of the mode: that of its class")
    target: DottedName = Field(
        alias="_target_", description="clip by this class, which derives from runner.clip.ClipMode"
    )


class _Unknown(Clip):
    """A mode that cannot be used, so that nobody knows its options."""

    model_config = ConfigDict(extra="allow")


class _UnknownOwn(_OwnClip, _Unknown):
    pass


def clip_section(plain: object) -> tuple[type[Clip], str | None]:
    """Return the model of section ``clip`` for its mode, and why a user's mode cannot be used."""
    given = plain if isinstance(plain, Mapping) else {}
    mode, target = given.get("mode"), given.get("_target_")
    if target is None:
        known = isinstance(mode, str) and mode in NAMES
        return (_section(str(mode), None) if known else _Unknown), None
    if not isinstance(target, str) or "." not in target:
        return _UnknownOwn, None
    try:
        return _section("", target), None
    except ModeError as error:
        return _UnknownOwn, str(error)


@cache
def _section(mode: str, target: str | None) -> type[Clip]:
    """Return the model of a mode: defaults of ours are in ``conf/``, those of a user's in it."""
    described = MODES[mode] if target is None else load(target)
    fields: dict[str, Any] = {
        name: (one.hint, ... if target is None else one.default)
        for name, one in options_of(described).items()
    }
    base = Clip if target is None else _OwnClip
    try:
        made: type[Clip] = create_model(f"Clip_{mode or 'own'}", __base__=base, **fields)
        made.model_rebuild()
    except Exception as error:  # pydantic raises several kinds for types that it cannot check
        raise ModeError(f"the types of its options cannot be checked: {error}") from error
    made.described = described
    return made


def _restore(mode: str, target: str | None, state: dict[Any, Any]) -> Clip:
    section = _section(mode if target is None else "", target)
    made = section.__new__(section)
    made.__setstate__(state)
    return made


def modes_with(option: str) -> list[str]:
    """Return the modes of this project that have an option of their own."""
    return [name for name in NAMES if option in options_of(MODES[name])]
