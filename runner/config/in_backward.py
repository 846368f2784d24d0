"""What goes with clipping in the backward pass, and why other things do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runner.config.modes import NAMES, Mode, built_in
from runner.config.problem import or_list

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
        able = [name for name in NAMES if built_in(name).info.by_tensor]
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
