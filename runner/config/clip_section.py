"""Section ``clip``: the keys of all modes, and which steps are left out as spikes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from runner.config import section as t
from runner.config.mode import Mode, ModeInfo, validated
from runner.config.modes import class_of
from runner.config.section import Conflicts, Section, key, together

WINDOW = 128  # kept steps that ``sigma`` compares with by default
_SHORT = BeforeValidator(
    lambda given: {"rule": given} if given is None or isinstance(given, str) else given
)


class Skip(Section):
    """Whole optimizer steps that are left out because their gradient norm is a spike."""

    rule: Literal["sigma", "ema"] | None = key("skip above mean + k sigma, or k averages", None)
    k: t.Positive | None = key("lower it to skip more; null: 6 (sigma), 20 (ema)", None)
    window: int | None = key("compare with so many kept steps (sigma); null: 128", None, ge=2)
    decay: float | None = key("weigh the past (ema); null: 0.99", None, gt=0, lt=1)
    min_steps: t.Count | None = key("skip none before; null: window/2, 1/(1 - decay)", None)
    accept_after: t.Count | None = key("accept a level after so many skips; null: never", 20)

    def conflicts(self) -> Conflicts:
        """Yield options without a rule, or of another rule than the chosen one."""
        if self.rule is None:
            for name, field in type(self).model_fields.items():
                if getattr(self, name) != field.default:
                    yield name, "needs a rule: add clip.skip=sigma or clip.skip=ema"
            return
        option_of_other_rule = "window" if self.rule == "ema" else "decay"
        if getattr(self, option_of_other_rule) is not None:
            yield option_of_other_rule, f"is no option of the rule {self.rule}"
        window = self.window or WINDOW
        if self.rule == "sigma" and self.min_steps and not 2 <= self.min_steps <= window:
            yield "min_steps", f"must be from 2 to the window of {window} steps"


class Clip(Section):
    """The keys of all modes, and under any further key the options of the mode."""

    model_config = ConfigDict(extra="allow")

    mode: t.Text = key("choose what is clipped, and how")
    target: Any = key("clip by this class of your own", None, alias="_target_")
    threshold: t.Positive | None = key("lower it to clip more; `calibrate` suggests one")
    norm_type: t.NormOrder = key("measure this norm of the gradient: 1, 2 or inf")
    nonfinite: Literal["skip", "error", "ignore"] = key("what to do with a step of NaN or inf")
    max_skips: t.Count | None = key("end the run after so many skips in a row; null: never")
    # With a default, unlike other keys: files of users, and runs recorded earlier, lack them.
    scales: Literal["auto", "all"] = key("scale all gradients; auto: not Muon's matrices", "auto")
    when: Literal["step", "backward"] = key("clip before the step, or in the backward", "step")
    step_in_backward: bool = key("step each parameter in the backward pass too", False)
    skip: Annotated[Skip, _SHORT] = key("leave out steps whose gradient norm is a spike", Skip())
    what_if: Annotated[list[t.Positive], BeforeValidator(t.listed)] = key(
        "log the share of steps that these thresholds would clip"
    )

    _options: Mode = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _with_options(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate the keys of all modes and the options of this one; errors of both together."""
        errors = []
        options = Mode()
        if isinstance(given, Mapping) and given.keys() & {"mode", "_target_"}:
            keys = {field.alias or name for name, field in cls.model_fields.items()}
            values = {name: value for name, value in given.items() if name not in keys}
            if "threshold" in given:
                values["threshold"] = given["threshold"]
            try:
                options = validated(class_of(given), values)
            except ValidationError as error:
                errors += error.errors(include_url=False)
        try:
            clip = handler(given)
        except ValidationError as error:
            errors += error.errors(include_url=False)
        if errors:
            raise together(errors)
        clip._options = replace(options, norm_type=clip.norm_type, scales=clip.scales)
        return clip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Clip) and self.model_dump() == other.model_dump()

    @property
    def options(self) -> Mode:
        """The mode with its options, as :func:`runner.clip.build` takes it."""
        return self._options

    @cached_property
    def info(self) -> ModeInfo:
        """What the mode with these options clips, compares and measures."""
        return self._options.info_here()
