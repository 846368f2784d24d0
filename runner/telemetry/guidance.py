"""What the figures of a run say about its threshold, in words.

The bounds are those that people use: a threshold that clips more than half of the updates is
"extremely aggressive", and lowering the learning rate does the same more plainly; the 90th
percentile of the unclipped norms is a start (Google Research, Deep Learning Tuning Playbook,
https://github.com/google-research/tuning_playbook).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer

MOSTLY = 0.5
"""Share of clipped steps above which a threshold limits the learning rate."""

FULLY = 0.95
"""Share of clipped steps above which a threshold is as good as always reached."""

NEGLIGIBLE = 0.1
"""Share of a gradient's typical element below which what an optimizer adds to its divisor is lost
beside it."""

SCALE_INVARIANT = ("adam", "rmsprop", "adagrad", "adadelta", "lamb")
"""Parts of the names of optimizers that divide by the size of earlier gradients."""

PEAKS = {
    "norm": "‖G‖",
    "value": "gradient element",
    "adaptive": "‖G_u‖/‖W_u‖ of a unit",
}
"""What each mode compares with its threshold."""


@dataclass(frozen=True)
class Setting:
    """How a run was clipped, as far as its figures have to be read by it.

    Attributes:
        mode: of clipping.
        threshold: λ, None where the mode has none.
        nonfinite: what was done with a step whose gradient is not finite.
        invariant: the name of the optimizer, if the size of gradients cancels in it.
    """

    mode: str
    threshold: float | None
    nonfinite: Literal["skip", "error", "ignore"] = "skip"
    invariant: str | None = None


def guidance(summary: Mapping[str, Any], setting: Setting) -> list[str]:
    """Sentences on a run's threshold; none where nothing is to be said.

    Args:
        summary: of the run, from :meth:`runner.telemetry.meter.Meter.summary`.
        setting: how it was clipped.
    """
    said = []
    steps, skipped = summary["steps"], summary["grad/nonfinite"]
    if skipped:
        said.append(_nonfinite(skipped, steps, setting))
    peak = summary["clip/peak"]
    if setting.threshold is None or not peak:
        return said
    ratio = summary["clip/ratio_total"]
    if ratio == 0:
        said.append(_never(peak, setting))
    elif ratio > MOSTLY:
        said.append(_mostly(ratio, summary["clip/fraction"], peak, setting))
    if ratio > FULLY and setting.mode == "norm" and setting.invariant is not None:
        said.append(
            f"{setting.invariant} divides by the size of earlier gradients, so thresholds that "
            "bind in nearly every step train nearly alike: do not read much into a difference "
            "between two of them."
        )
    return said


def invariant(optimizer: Optimizer, threshold: float | None, parameters: int) -> str | None:
    """The name of ``optimizer``, if a gradient held to ``threshold`` cancels in its steps.

    Adam, RMSprop and Adagrad divide by a mean of earlier gradients plus a constant (``eps``, and
    the root of Adagrad's initial sum). The size of gradients cancels only while that constant is
    small beside an element, threshold ÷ √parameters: not so in RMSProp with an eps of 1.

    Args:
        optimizer: the user's.
        threshold: λ of the whole gradient's norm, None where there is none.
        parameters: elements of the model.
    """
    name = type(optimizer).__name__
    if threshold is None or not any(part in name.lower() for part in SCALE_INVARIANT):
        return None
    options = optimizer.defaults
    added = float(options.get("eps") or 0.0)
    added += math.sqrt(float(options.get("initial_accumulator_value") or 0.0))
    element = threshold / math.sqrt(max(parameters, 1))
    return name if added < NEGLIGIBLE * element else None


def _nonfinite(skipped: int, steps: int, setting: Setting) -> str:
    done = "taken all the same" if setting.nonfinite == "ignore" else "skipped"
    return (
        f"{skipped} of {steps} steps had a gradient that was NaN or inf and were {done}; no "
        "threshold mends that: look at the learning rate, the loss and the precision."
    )


def _never(peak: Mapping[str, float], setting: Setting) -> str:
    largest, start = figure(peak["max"]), figure(peak["p90"])
    what = PEAKS.get(setting.mode, "figure it is compared with")
    return (
        f"The threshold {setting.threshold:g} never bound: the largest {what} was {largest}. It is "
        f"a safety net; for one that holds the largest tenth of the steps, set clip.threshold to "
        f"about {start}."
    )


def _mostly(ratio: float, fraction: float, peak: Mapping[str, float], setting: Setting) -> str:
    start = figure(peak["p90"])
    told = f"The threshold {setting.threshold:g} bound in {percent(ratio)} of the steps"
    if setting.mode != "norm":
        parts = {"value": "elements", "adaptive": "units"}.get(setting.mode, "parts")
        told += f" ({percent(fraction)} of the {parts} on average)"
        if fraction <= MOSTLY:
            return (
                f"{told}. To cut spikes alone, raise clip.threshold to about {start}, the 90th "
                "percentile."
            )
    return (
        f"{told}: it limits the learning rate rather than spikes. Lower optimizer.lr instead, or "
        f"raise clip.threshold to about {start}, the 90th percentile."
    )


def figure(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share in words of a hundred; one that is neither none nor all never reads as either."""
    if 0 < share < 0.001:
        return "under 0.1 %"
    if 0.999 < share < 1:
        return "over 99.9 %"
    whole = 100 * share
    return f"{whole:.0f} %" if whole in (0, 100) or 10 <= whole < 99 else f"{whole:.1f} %"
