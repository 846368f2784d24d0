"""Section ``clip.skip``: whole steps that are left out because a value of them is a spike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from runner.config.section import Conflict, Section
from runner.config.skip import ACCEPT_AFTER, problems
from runner.config.values import Count, Positive


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
