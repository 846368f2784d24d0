"""Section ``clip``: the keys of all modes. The model of a mode has its own options besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from runner.config import section as t
from runner.config.mode import Mode, ModeError, ModeInfo, load
from runner.config.modes import MODES, NAMES, ModeOptions, model_of, name_of
from runner.config.section import Conflict, OneOf, Section, key, read

WINDOW = 128
"""Number of kept steps that ``sigma`` compares with by default."""


class Skip(Section):
    """Whole optimizer steps that are left out because their gradient norm is a spike."""

    rule: Literal["sigma", "ema"] | None = key("skip above mean + k sigma, or k averages", None)
    k: t.Positive | None = key("lower it to skip more; null: 6 (sigma), 20 (ema)", None)
    window: int | None = key("compare with so many kept steps (sigma); null: 128", None, ge=2)
    decay: float | None = key("weigh the past (ema); null: 0.99", None, gt=0, lt=1)
    min_steps: t.Count | None = key("skip none before; null: window/2, 1/(1 - decay)", None)
    accept_after: t.Count | None = key("accept a level after so many skips; null: never", 20)

    @model_validator(mode="before")
    @classmethod
    def _of_rule(cls, given: Any) -> Any:
        """Read ``skip: sigma`` and ``skip: null`` of a file, which give the rule alone."""
        return {"rule": given} if given is None or isinstance(given, str) else given

    @property
    def options(self) -> dict[str, Any] | None:
        """Arguments that make the rule; None if nothing is skipped."""
        return None if self.rule is None else dict(self)

    def conflicts(self) -> Iterator[Conflict]:
        if self.rule is None:
            for name, field in type(self).model_fields.items():
                if getattr(self, name) != field.default:
                    yield Conflict(name, "needs a rule: add clip.skip=sigma or clip.skip=ema")
        elif self.rule == "ema" and self.window is not None:
            yield Conflict("window", "goes with the rule sigma; the memory of ema is its decay")
        elif self.rule == "sigma":
            if self.decay is not None:
                yield Conflict("decay", "goes with the rule ema; the memory of sigma is its window")
            most = self.window or WINDOW
            if self.min_steps is not None and not 2 <= self.min_steps <= most:
                yield Conflict("min_steps", f"must be from 2 to the window of {most} steps")


def skip_options(**given: Any) -> Skip:
    """Return the options of a rule with the defaults filled in; a ValueError names a wrong one."""
    made: Skip = read(Skip, given)
    window, decay = made.window or WINDOW, made.decay or 0.99
    if made.rule == "sigma":
        usual = {"k": 6.0, "window": window, "min_steps": max(2, window // 2)}
    else:
        usual = {"k": 20.0, "decay": decay, "min_steps": max(1, round(1 / (1 - decay)))}
    return made.model_copy(update=usual | made.model_dump(exclude_none=True))


class Clip(ModeOptions):
    mode: Annotated[str, OneOf(NAMES)] = key("choose what is clipped, and how")
    norm_type: t.NormOrder = key("measure this norm of the gradient: 1, 2 or inf")
    nonfinite: Literal["skip", "error", "ignore"] = key("what to do with a step of NaN or inf")
    max_skips: t.Count | None = key("end the run after so many skips in a row; null: never")
    # With a default, unlike other keys: files of users, and runs recorded earlier, lack them.
    scales: Literal["auto", "all"] = key("scale all gradients; auto: not Muon's matrices", "auto")
    when: Literal["step", "backward"] = key("clip before the step, or in the backward", "step")
    step_in_backward: bool = key("step each parameter in the backward pass too", False)
    skip: Skip = key("leave out whole steps whose gradient norm is a spike", Skip())
    what_if: list[t.Positive] = key("log the share of steps that these thresholds would clip")

    @property
    def own_target(self) -> str | None:
        return getattr(self, "target", None)

    @property
    def kind(self) -> str | type[Mode]:
        """Name of the mode, or the user's own class."""
        return self.mode if self.own_target is None else self.described

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that make the mode: those of all modes, and options of its own."""
        return {**super().options, "norm_type": self.norm_type, "scales": self.scales}

    @property
    def info(self) -> ModeInfo:
        return self.described.info_with(self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class of a mode is made when it is first asked for, so pickle cannot find it by name.
        return read_clip, (self.model_dump(by_alias=True),)

    def conflicts(self) -> Iterator[Conflict]:
        found = list(super().conflicts())
        yield from found
        if self.scales == "all" and self.described.info.parts is not None:
            yield Conflict(
                "scales", "this mode multiplies no gradients by one coefficient: use auto"
            )
        if self.what_if and not found and (self.info.nested or self.info.derived):
            name = name_of(self.described)
            yield Conflict("what_if", f"clip={name} has no fixed threshold: leave it empty")


def _own_model(target: str) -> type[Clip]:
    made: type[Clip] = model_of(load(target), _OwnClip, True)  # type: ignore[arg-type]
    return made


class _OwnClip(Clip):
    mode: t.Text = key("name of the mode: that of its class")
    target: Annotated[str, AfterValidator(lambda target: _own_model(target) and target)] = Field(
        alias="_target_", description="clip by this class, which derives from runner.clip.ClipMode"
    )


# Of a mode that cannot be used nobody knows the options.
class _Unknown(Clip):
    model_config = ConfigDict(extra="allow")


class _UnknownOwn(_OwnClip):
    model_config = ConfigDict(extra="allow")


def clip_model(plain: object) -> type[Clip]:
    """Return the model of section ``clip`` for the mode that it names, also of a wrong one."""
    given = plain if isinstance(plain, Mapping) else {}
    mode, target = given.get("mode"), given.get("_target_")
    made: type[Clip] = _Unknown if target is None else _UnknownOwn
    if target is None and mode in NAMES:
        made = model_of(MODES[str(mode)], Clip, False)  # type: ignore[arg-type]
    elif target is not None:
        with suppress(ModeError):
            made = _own_model(str(target))
    return made


def read_clip(plain: object) -> Clip:
    return clip_model(plain).model_validate(plain)
