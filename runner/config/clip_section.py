"""Section ``clip``: how the gradient of each optimizer step is clipped."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from runner.config.section import Conflict, Section
from runner.config.values import (
    Allowed,
    NormOrder,
    OutputDims,
    Positive,
    Positives,
    Texts,
    option_of,
)


class Clip(Section):
    """How the gradient of each optimizer step is clipped."""

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
    exclude: Literal["auto"] | Texts = Field(
        description="adaptive: do not clip these parameters, patterns of names, such as [head.*]; "
        "auto: the weights of the model's heads"
    )
    units: OutputDims | None = Field(
        description="adaptive: say which dimensions of a parameter index its outputs, by patterns "
        "of names, where a warning asks for it"
    )
    eps: float = Field(
        gt=0,
        description="adaptive: count a weight's norm as at least this, so that weights of zero can "
        "move",
    )
    nonfinite: Literal["skip", "error", "ignore"] = Field(
        description="choose what to do with a step whose gradient is not finite: leave it out, end "
        "the run, or take it"
    )
    what_if: Positives = Field(
        description="try further thresholds: log the share of steps that each would have clipped"
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Yield a threshold that is not used, or that is missing."""
        if self.mode == "none" and self.threshold is not None:
            yield Conflict("threshold", "clip=none clips nothing, so it takes no threshold")
        if self.mode != "none" and self.threshold is None:
            yield Conflict(
                "threshold", f"clip={self.mode} needs a finite number greater than 0; or clip=none"
            )
