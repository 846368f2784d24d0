"""The whole configuration of a run, and values of several sections that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from runner.config.clip_section import Clip
from runner.config.mode import Mode
from runner.config.modes import MODES
from runner.config.plugin_section import PluginSection, pipeline_microbatches
from runner.config.problem import or_list
from runner.config.section import Conflict, Section, Target, Text
from runner.config.sections import (
    OWN_DATA,
    WHOLE_PARAMETERS,
    Accumulation,
    Calibrate,
    Checkpoint,
    DataSection,
    EarlyStop,
    Eval,
    Launch,
    Log,
    LossSection,
    Precision,
    Report,
    Resume,
    Shutdown,
    SweepSection,
    Telemetry,
    Tracker,
    Train,
    Verify,
)

__all__ = ["OWN_DATA", "SHORT", "DataSection", "LossSection", "RunConfig"]
__all__ += ["not_measured", "refusals"]

SHORT = {"resume": "resume.from", "clip.skip": "clip.skip.rule"}
"""Sections that may be given a value, and the key that it is the value of."""

PLUGINS = ("single", "ddp", "fsdp")
"""Plugins that make gradients final while the backward pass runs."""


def refusals(
    mode: type[Mode],
    options: Mapping[str, Any],
    *,
    step: bool,
    nonfinite: str,
    fp16: bool,
    skip: bool,
) -> Iterator[tuple[str, str]]:
    """Yield the keys that do not go with clipping in the backward pass, each with the reason."""
    if why := mode.waits_for(options):
        able = [name for name, one in MODES.items() if one.info.by_tensor]
        yield "clip.when", f"this mode {why}: use step; backward goes with clip={or_list(able)}"
    if fp16:
        yield (
            "precision",
            "an overflow leaves out a whole step, and may be in its last gradient: use bf16, fp32 "
            "or clip.when=step",
        )
    if nonfinite == "ignore":
        yield (
            "clip.nonfinite",
            "clips nothing in a step that is not finite, but some gradients are clipped before "
            "that is known: use error, skip or clip.when=step",
        )
    if nonfinite == "skip" and step:
        yield (
            "clip.nonfinite",
            "a step in the backward pass cannot be taken back where a later gradient is not "
            "finite: use error, which ends the run, or clip.step_in_backward=false",
        )
    if skip:
        yield (
            "clip.skip",
            "the norm and the loss that tell of a spike are known after the backward pass: use "
            "null or clip.when=step",
        )
    if mode.info.clips == "updates" and not step:
        yield "clip.step_in_backward", "this mode limits the step itself: use true"


def not_measured(step: bool) -> Mapping[str, str]:
    """Return the measurements of section ``telemetry`` that are not possible, with the reasons."""
    gone = "compares gradients that are clipped, or freed, in the backward pass: use clip.when=step"
    found = {"clip_cosine": gone, "noise_scale": gone}
    if step:
        found["update_ratio"] = (
            "copies the weights before a step, but parameters are stepped in the backward pass: "
            "use clip.step_in_backward=false"
        )
    return found


class RunConfig(Section):
    """The configuration of one run. `runner.config.check.parse` makes one of a plain dict."""

    plugin: PluginSection
    clip: Clip
    accumulation: Accumulation
    precision: Precision
    model: Target
    data: DataSection
    optimizer: Target
    scheduler: Target
    # With a default: runs that were recorded earlier lack it.
    loss: LossSection = LossSection()
    tracker: Tracker
    train: Train
    eval: Eval
    early_stopping: EarlyStop
    log: Log
    checkpoint: Checkpoint
    telemetry: Telemetry
    launch: Launch
    shutdown: Shutdown
    resume: Resume
    sweep: SweepSection
    # With a default: runs that were recorded earlier lack it.
    report: Report = Report(baseline=None)
    calibrate: Calibrate
    verify: Verify
    # Seeds of numpy and scikit-learn end at 2**32 - 1; torch takes more.
    seed: int = Field(
        ge=0,
        le=2**32 - 1,
        description="seed all random numbers; change it to see how much runs differ by chance",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        description="train on this device; auto: cuda where there is one"
    )
    callbacks: list[Target] = Field(
        description="call objects of your own after steps and evaluations, by _target_ and "
        "arguments"
    )
    recipe: Text = Field(description="start from this published setting; none: from none")

    def _in_backward(self) -> Iterator[Conflict]:
        """Yield what does not go with clipping in the backward pass."""
        clip = self.clip
        if clip.when != "backward":
            if clip.step_in_backward:
                yield Conflict("clip.step_in_backward", "needs clip.when=backward")
            return
        if self.plugin.name not in PLUGINS:
            message = (
                f"plugin={self.plugin.name} makes gradients final after the backward pass: use "
                "step, plugin=single, plugin=ddp or plugin=fsdp"
            )
            yield Conflict("clip.when", message)
        found = refusals(
            clip.described,
            clip.options,
            step=clip.step_in_backward,
            nonfinite=clip.nonfinite,
            fp16=self.precision.name == "fp16",
            skip=clip.skip.rule is not None,
        )
        yield from (Conflict(*each) for each in found)
        for name, why in not_measured(clip.step_in_backward).items():
            if getattr(self.telemetry, name):
                yield Conflict(f"telemetry.{name}", why)

    def conflicts(self) -> Iterator[Conflict]:
        """Yield values of several sections that exclude each other."""
        if self.optimizer.target in WHOLE_PARAMETERS and self.plugin.shards_parameters:
            instead = "use plugin=ddp, plugin=zero plugin.zero_stage=1, or another optimizer"
            message = f"steps whole parameters, which plugin={self.plugin.name} shards; {instead}"
            yield Conflict("optimizer._target_", message)
        yield from self._in_backward()
        measured = self.telemetry.conflicts_with(self.plugin, self.clip, self.accumulation.steps)
        for conflict in measured:
            yield conflict._replace(key=f"telemetry.{conflict.key}")
        for name in self.verify.modes or ():
            if name != self.clip.mode and (nested := MODES[name].info.nested):
                message = f"{name} needs clip.{nested}: give clip={name} with its {nested}"
                yield Conflict("verify.modes", message)
        parts = pipeline_microbatches(self.plugin)
        if parts is not None and self.data.batch_size < parts:
            filled = f"to fill {parts} microbatches of a pipeline (plugin.num_microbatches)"
            yield Conflict("data.batch_size", f"must be {parts} or more, {filled}")
