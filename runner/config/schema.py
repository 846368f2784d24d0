"""The whole configuration of a run, and values of several sections that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from runner.config import sections as s
from runner.config.clip_section import Clip, read_clip
from runner.config.mode import Mode
from runner.config.modes import MODES
from runner.config.plugin_section import PluginSection
from runner.config.problem import or_list
from runner.config.section import Conflict, Keys, Target, Text, key
from runner.config.sections import OWN_DATA, DataSection, LossSection

__all__ = ["NO_UPDATE_RATIO", "OWN_DATA", "SHORT", "DataSection", "LossSection", "RunConfig"]
__all__ += ["refusals"]

SHORT = {"resume": "resume.from", "clip.skip": "clip.skip.rule"}
"""Sections that may be given a value, and the key that it is the value of."""

WHOLE_PARAMETERS = ("torch.optim.Adafactor",)
"""Optimizers of ``conf/optimizer`` that cannot step a parameter of which a rank holds a shard."""


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
        yield "precision", "an overflow leaves out a whole step: use bf16, fp32 or clip.when=step"
    if nonfinite == "ignore":
        yield (
            "clip.nonfinite",
            "clips before all gradients are known: use error, skip or clip.when=step",
        )
    if nonfinite == "skip" and step:
        text = "a step in the backward pass cannot be taken back: use error, which ends the run"
        yield "clip.nonfinite", text
    if skip:
        yield "clip.skip", "a spike is known after the backward pass: use null or clip.when=step"
    if mode.info.clips == "updates" and not step:
        yield "clip.step_in_backward", "this mode limits the step itself: use true"


NO_UPDATE_RATIO = "copies the weights before a step: use clip.step_in_backward=false"


class RunConfig(Keys):
    """The configuration of one run. `runner.config.check.parse` makes one of a plain dict."""

    plugin: PluginSection
    clip: Annotated[Clip, PlainValidator(read_clip)]
    accumulation: s.Accumulation
    precision: s.Precision
    model: Target
    data: DataSection
    optimizer: Target
    scheduler: Target
    loss: LossSection = LossSection()  # like report: runs that were recorded earlier lack it
    tracker: s.Tracker
    train: s.Train
    eval: s.Eval
    early_stopping: s.EarlyStop
    log: s.Log
    checkpoint: s.Checkpoint
    telemetry: s.Telemetry
    launch: s.Launch
    shutdown: s.Shutdown
    resume: s.Resume
    sweep: s.SweepSection
    report: s.Report = s.Report(baseline=None)
    calibrate: s.Calibrate
    verify: s.Verify
    # Seeds of numpy and scikit-learn end at 2**32 - 1; torch takes more.
    seed: int = key("change it to see how much runs differ by chance", ge=0, le=2**32 - 1)
    device: Literal["auto", "cpu", "cuda"] = key("train on it; auto: cuda where there is one")
    callbacks: list[Target] = key("call objects of your own after steps and evaluations")
    recipe: Text = key("start from this published setting; none: from none")

    def conflicts(self) -> Iterator[Conflict]:
        plugin = self.plugin
        if self.optimizer.target in WHOLE_PARAMETERS and plugin.shards_parameters:
            message = f"steps whole parameters, which plugin={plugin.name} shards; use plugin=ddp"
            yield Conflict("optimizer._target_", message)
        yield from self._in_backward()
        for name in self.verify.modes or ():
            if name != self.clip.mode and (nested := MODES[name].info.nested):
                message = f"{name} needs clip.{nested}: give clip={name} with its {nested}"
                yield Conflict("verify.modes", message)
        parts = plugin.pipeline_microbatches
        if parts is not None and self.data.batch_size < parts:
            filled = f"to fill {parts} microbatches of a pipeline (plugin.num_microbatches)"
            yield Conflict("data.batch_size", f"must be {parts} or more, {filled}")

    def _in_backward(self) -> Iterator[Conflict]:
        clip, plugin = self.clip, self.plugin.name
        if clip.when != "backward":
            if clip.step_in_backward:
                yield Conflict("clip.step_in_backward", "needs clip.when=backward")
            return
        if plugin != "single":
            message = f"plugin={plugin} makes gradients final after the backward pass: use step"
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
        if clip.step_in_backward and self.telemetry.update_ratio:
            yield Conflict("telemetry.update_ratio", NO_UPDATE_RATIO)
