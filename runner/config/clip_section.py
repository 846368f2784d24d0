"""Section ``clip``: the mode with its options, and which steps are left out.

The options, of which all modes have some, are declared by `runner.config.mode` and
`runner.config.modes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from runner.config.section import Conflicts, Section, key, refusal, together

WINDOW = 128  # kept steps that ``sigma`` compares with by default
SkipRuleName = Literal["sigma", "ema", "constant"]
LIMITS_UPDATES = "clip=update limits updates itself: compare norm, loss or any"
Compared = Literal["norm", "loss", "update", "any"]
_OF_OTHER_RULES: Mapping[SkipRuleName, Sequence[str]] = {
    "sigma": ["decay"],
    "ema": ["window"],
    "constant": ["window", "decay", "min_steps", "accept_after"],
}
_SHORT = BeforeValidator(
    lambda given: {"rule": given} if given is None or isinstance(given, str) else given
)


class Skip(Section):
    """Whole optimizer steps that are left out because their norm, loss or update is a spike."""

    rule: SkipRuleName | None = key("skip above mean + k sigma, k averages, or k itself", None)
    of: Compared = key("compare the norm, the loss, the update, or any of norm and loss", "norm")
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
                    yield name, "needs a rule: add clip.skip=sigma, ema or constant"
            return
        for name in _OF_OTHER_RULES[self.rule]:
            if getattr(self, name) != type(self).model_fields[name].default:
                yield name, f"is no option of the rule {self.rule}"
        if self.rule == "constant" and self.of == "any":
            yield "of", "k is one bound: choose norm, loss or update for clip.skip=constant"
        elif self.rule == "constant" and self.k is None:
            yield "k", f"is the largest {self.of} that is no spike: set it for clip.skip=constant"
        window = self.window or WINDOW
        if self.rule == "sigma" and self.min_steps and not 2 <= self.min_steps <= window:
            yield "min_steps", f"must be from 2 to the window of {window} steps"


class Clip(Section):
    """The keys that are no options of a mode; further keys are the options of the chosen one."""

    model_config = ConfigDict(extra="allow")

    mode: t.Text = key("choose what is clipped, and how")
    target: Any = key("clip by this class of your own", None, alias="_target_")
    nonfinite: Literal["skip", "error", "ignore"] = key("what to do with a step of NaN or inf")
    max_skips: t.Count | None = key("end the run after so many skips in a row; null: never")
    # With a default, unlike other keys: files of users, and runs recorded earlier, lack them.
    when: Literal["step", "backward"] = key("clip before the step, or in the backward", "step")
    step_in_backward: bool = key("step each parameter in the backward pass too", False)
    skip: Annotated[Skip, _SHORT] = key(
        "leave out steps whose gradient norm or loss is a spike", Skip()
    )
    what_if: Annotated[list[t.Positive], BeforeValidator(t.listed)] = key(
        "log the share of steps that these thresholds would clip"
    )

    _options: Mode = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _with_options(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate these keys, and the options of the mode; errors of both together."""
        errors = []
        mode = Mode()
        if isinstance(given, Mapping) and given.keys() & {"mode", "_target_"}:
            keys = {field.alias or name for name, field in cls.model_fields.items()}
            options = {name: value for name, value in given.items() if name not in keys}
            try:
                mode = validated(class_of(given), options)
                _refuse_options_of_programs(mode)
            except ValidationError as error:
                errors += error.errors(include_url=False)
        try:
            clip = handler(given)
        except ValidationError as error:
            errors += error.errors(include_url=False)
        if errors:
            raise together(errors)
        clip._options = mode
        conflicts = list(clip._conflicts_with_mode())
        if conflicts:
            raise refusal(conflicts)
        return clip

    def conflicts(self) -> Conflicts:
        """Yield a step in the backward pass that would be taken before the gradient is clipped."""
        if self.step_in_backward and self.when != "backward":
            yield "step_in_backward", "needs clip.when=backward"

    def _conflicts_with_mode(self) -> Conflicts:
        """Yield values that the mode does not take."""
        info = type(self._options).info
        if self._options.scales == "all" and info.parts is not None:
            yield "scales", "this mode multiplies no gradients by one coefficient: use auto"
        if self.skip.of == "update" and info.clips == "updates":
            yield "skip.of", LIMITS_UPDATES
        if self.what_if and (info.nested or info.follows == "norms"):
            yield "what_if", f"clip={self.mode} has no fixed threshold: leave it empty"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Clip) and self.model_dump() == other.model_dump()

    @property
    def options(self) -> Mode:
        """The mode with its options, as :func:`runner.clip.build` takes it."""
        return self._options

    @property
    def threshold(self) -> float | None:
        """λ of the mode; None if the mode has no threshold."""
        return self._options.threshold

    @property
    def norm_type(self) -> float:
        """The order of the norm of the gradient that is measured."""
        return self._options.norm_type

    @cached_property
    def info(self) -> ModeInfo:
        """What the mode with these options clips, compares and measures."""
        return self._options.info_here()


def _refuse_options_of_programs(mode: Mode) -> None:
    """Refuse values of options that only a program may give to a mode."""
    conflicts = []
    if mode.threshold == math.inf:
        message = "must be a finite number; clip=none measures without clipping"
        conflicts.append(("threshold", message))
    if mode.norm_type not in (1, 2, math.inf):
        conflicts.append(("norm_type", "must be 1, 2 or inf"))
    if conflicts:
        raise refusal(conflicts)
