"""A calibration as text for a person."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from runner.telemetry.guidance import PEAKS, figure, percent

COLUMNS = ("mean", "p50", "p75", "p90", "p95", "p99", "max")


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines to print.

    Args:
        found: what ``calibrate.json`` holds.
    """
    yield f"{found['steps']} steps without clipping, the first {found['warmup_steps']} as warm-up"
    yield from _trouble(found)
    yield ""
    yield from _distributions(found)
    yield ""
    yield from _suggested(found)
    yield "threshold   share of the steps it would have clipped"
    for threshold, share in found["would_clip"].items():
        yield f"{threshold:>9}   {percent(share)}"
    yield ""
    if found["published"]:
        yield f"Published with clip={found['mode']} (other losses and batches: orders of magnitude)"
        width = max(len(one["recipe"]) for one in found["published"])
        for one in found["published"]:
            share = percent(one["would_clip"])
            name = f"{one['recipe']:<{width}}"
            yield f"{one['threshold']:>9g}   {name}  here {share:>12}  {one['source']}"
        yield "What each clipped, and how far it stands from its paper: the head of its recipe"
        yield ""
    if found["next"]:
        yield "Next"
        yield from (f"  {command}" for command in found["next"].values())


def _trouble(found: Mapping[str, Any]) -> Iterator[str]:
    if found["nonfinite"]:
        yield (
            f"{found['nonfinite']} of them had a gradient that was NaN or inf; the rest is of the "
            "others"
        )
    if not math.isfinite(found["loss"]):
        yield "the loss diverged without clipping: the norms after that say little"


def _distributions(found: Mapping[str, Any]) -> Iterator[str]:
    """One line a stream and part of it; ‖G‖ always, and what the mode compares where it differs."""
    names = {"norm": "‖G‖"}
    if "peak" in found:
        names["peak"] = f"largest {PEAKS.get(found['mode'], 'figure')}"
    rows = [
        (f"{name}, {when}", found[key][part])
        for key, name in names.items()
        for part, when in (("warm_up", "warm-up"), ("after_warm_up", "then"))
        if found[key][part]["steps"]
    ]
    width = max(len(label) for label, _ in rows)
    yield " " * width + "".join(f"{column:>10}" for column in COLUMNS)
    for label, one in rows:
        yield f"{label:<{width}}" + "".join(f"{figure(one[column]):>10}" for column in COLUMNS)


def _suggested(found: Mapping[str, Any]) -> Iterator[str]:
    suggested = found["suggested"]
    if suggested is None:
        yield (
            "No threshold can be suggested: no gradient after the warm-up was finite and above 0. "
            "Try a lower optimizer.lr, or fewer calibrate.steps."
        )
    else:
        start, low, high = (f"{suggested[key]:g}" for key in ("start", "low", "high"))
        yield f"clip.threshold to begin with, for clip={found['mode']}: {start} (the p90)"
        yield f"range worth a sweep: {low} to {high} (half to ten times the mean)"
    yield ""
