"""Section ``clip``: how the gradient of each optimizer step is clipped.

All modes share the keys of :class:`Clip`. Each mode adds its own options, which it declares as
fields of its description (see :mod:`runner.config.modes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from runner.config.modes import (
    NAMES,
    Mode,
    ModeError,
    ModeInfo,
    built_in,
    load,
    options_of,
)
from runner.config.section import Conflict, Section
from runner.config.skip_section import Skip
from runner.config.values import (
    Allowed,
    Count,
    DottedName,
    NormOrder,
    Positive,
    Positives,
    Text,
    option_of,
)


class Clip(Section):
    """How the gradient of each optimizer step is clipped."""

    described: ClassVar[type[Mode]] = Mode

    mode: Annotated[str, option_of("clip")] = Field(
        description="choose what is clipped: the norm of the whole gradient, each element, each "
        "unit, or nothing"
    )
    threshold: Annotated[
        Positive | None, Allowed("a finite number greater than 0, or null with clip=none")
    ] = Field(
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

    @property
    def own_target(self) -> str | None:
        """Full name of the class, where the mode is a user's own."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        # The class of a mode is made when it is first asked for, so pickle cannot find it by name.
        chosen = {"mode": self.mode, "_target_": self.own_target}
        return _restore, (chosen, self.__getstate__())

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
            yield Conflict(
                "threshold", f"clip={self.mode} needs a finite number greater than 0; or clip=none"
            )
            return
        found = [Conflict(*each) for each in self.described.conflicts(self.options)]
        yield from found
        if self.what_if and not found and self.info.derived:
            yield Conflict(
                "what_if",
                f"clip={self.mode} derives its limit from earlier steps, so no fixed "
                "threshold can be tried beside it; leave it empty, or use clip=norm",
            )


class OwnClip(Clip):
    """Clipping by a mode of the user's own."""

    mode: Text = Field(description="name of the mode: that of its class")
    target: Annotated[DottedName, Field(alias="_target_")] = Field(
        alias="_target_", description="clip by this class, which derives from runner.clip.ClipMode"
    )

    @property
    def own_target(self) -> str | None:
        """Full name of the class."""
        return self.target


class _UnknownClip(Clip):
    """Clipping by a mode that does not exist, so that nobody knows its options."""

    model_config = ConfigDict(extra="allow")


class _UnknownOwnClip(OwnClip):
    """Clipping by a class that cannot be used."""

    model_config = ConfigDict(extra="allow")


def clip_section(plain: object) -> type[Clip]:
    """Return the model of section ``clip`` for the mode that ``plain`` chooses."""
    node = plain if isinstance(plain, Mapping) else {}
    target, mode = node.get("_target_"), node.get("mode")
    if target is not None:
        named = isinstance(target, str) and "." in target
        return _own(target) if named else _UnknownOwnClip
    return _section(mode) if mode in NAMES else _UnknownClip


def lenient_clip_section(plain: object) -> type[Clip]:
    """Return the model, see :func:`clip_section`; for a wrong mode, one that takes any option."""
    try:
        return clip_section(plain)
    except ModeError:
        return _UnknownOwnClip


def _restore(chosen: Mapping[str, Any], state: dict[Any, Any]) -> Clip:
    section = clip_section(chosen)
    made = section.__new__(section)
    made.__setstate__(state)
    return made


@cache
def every_option() -> type[Clip]:
    """Return a model with the options of all modes of this project, for lists of keys."""
    hints: dict[str, list[Any]] = {}
    for described in map(built_in, NAMES):
        for name, one in options_of(described).items():
            hints.setdefault(name, []).append(one.hint)
    fields: dict[str, Any] = {name: (_any_of(each), ...) for name, each in hints.items()}
    return create_model("Clip_all", __base__=Clip, __doc__=Clip.__doc__, **fields)


def _any_of(hints: list[Any]) -> Any:
    """Return a type that allows what any of some annotations allows, and says what each means."""
    meanings = [FieldInfo.from_annotation(hint).description or "" for hint in hints]
    if len(hints) == 1:
        return hints[0]
    return Annotated[Union[*hints], Field(description="; or: ".join(dict.fromkeys(meanings)))]


def choices_with(key: str) -> list[str]:
    """Return the choices, such as ``clip=adaptive``, of this project's modes that have a key."""
    section, _, option = key.partition(".")
    if section != "clip":
        return []
    option = option.partition(".")[0]
    return [f"clip={name}" for name in NAMES if option in options_of(built_in(name))]


def with_mode_name(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the name of a user's mode in ``clip.mode``."""
    clip = plain.get("clip")
    target = clip.get("_target_") if isinstance(clip, Mapping) else None
    if not isinstance(clip, Mapping) or not isinstance(target, str):
        return dict(plain)
    return {**plain, "clip": {**clip, "mode": target.rpartition(".")[2]}}


@cache
def _section(mode: str) -> type[Clip]:
    """Return the model for a mode of this project, whose defaults are in its file of ``conf/``."""
    described = built_in(mode)
    fields: dict[str, Any] = {name: (one.hint, ...) for name, one in options_of(described).items()}
    made = create_model(f"Clip_{mode}", __base__=Clip, **fields)
    made.described = described
    return made


@cache
def _own(target: str) -> type[Clip]:
    """Return the model for a user's mode, whose defaults are those of its class."""
    described = load(target)
    fields: dict[str, Any] = dict(options_of(described))
    try:
        made = create_model("Clip_own", __base__=OwnClip, **fields)
    except Exception as error:  # pydantic raises several kinds for types that it cannot check
        raise ModeError(f"the types of its options cannot be checked: {error}") from error
    made.described = described
    return made
