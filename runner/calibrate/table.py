"""The text of a calibration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from runner.calibrate.distribution import POINTS
from runner.config.modes import ModeInfo, info_of
from runner.config.notation import percent, plural, rounded
from runner.telemetry.guidance import FEWEST

COLUMNS = ("mean", *(f"p{point}" for point in POINTS), "max")


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines to print."""
    info = info_of(found["mode"], found["mode_info"])
    measured = plural(found["steps"], "step")
    yield f"{measured} without clipping, the first {found['warmup_steps']} as warm-up"
    yield from _trouble(found)
    yield ""
    yield from _distributions(found, info)
    yield ""
    yield from _suggested(found, info)
    parts = found.get("would_clip_parts")
    head = "threshold   share of the steps it would have clipped"
    yield head + (f", and of their {info.parts}" if parts else "")
    for threshold, share in found["would_clip"].items():
        own = f"   {percent(parts[threshold]):>12}" if parts else ""
        yield f"{threshold:>9}   {percent(share):>12}{own}"
    yield ""
    if found["published"]:
        yield f"Published with clip={found['mode']} (other losses and batches: orders of magnitude)"
        width = max(len(one["recipe"]) for one in found["published"])
        for one in found["published"]:
            share = percent(one.get("would_clip_parts", one["would_clip"]))
            name = f"{one['recipe']:<{width}}"
            yield f"{one['threshold']:>9g}   {name}  here {share:>12}  {one['source']}"
        yield "The header of each recipe says what its paper clipped, and how the recipe differs"
        yield ""
    if found["next"]:
        yield "Next"
        yield from (f"  {command}" for command in found["next"].values())


def _trouble(found: Mapping[str, Any]) -> Iterator[str]:
    if found["nonfinite"]:
        yield (
            f"{found['nonfinite']} of them had a gradient that was NaN or inf; the numbers below "
            "leave these steps out"
        )
    steps = found["steps"] - found["warmup_steps"]
    if steps < FEWEST:
        few = "1 step was" if steps == 1 else f"{steps} steps were"
        yield f"only {few} measured after the warm-up: too few to rely on what follows"
    if not math.isfinite(found["loss"]):
        yield "the loss diverged without clipping: later norms are not representative"


def _distributions(found: Mapping[str, Any], info: ModeInfo) -> Iterator[str]:
    """Yield a line for each distribution: ‖G‖, and the values that other modes compare with λ."""
    names = {"norm": "‖G‖"}
    if "norm_scaled" in found:
        names["norm_scaled"] = "‖G‖ without Muon's matrices"
    if "peak" in found:
        names["peak"] = f"largest {info.stat}"
    rows = [
        (f"{name}, {when}", found[key][part])
        for key, name in names.items()
        for part, when in (("warm_up", "warm-up"), ("after_warm_up", "then"))
        if found[key][part]["steps"]
    ]
    width = max(len(label) for label, _ in rows)
    yield " " * width + "".join(f"{column:>10}" for column in COLUMNS)
    for label, one in rows:
        yield f"{label:<{width}}" + "".join(f"{rounded(one[column]):>10}" for column in COLUMNS)
    if "parts" in found:
        name, parts = info.parts, found["parts"]
        points = "  ".join(f"p{point} {rounded(parts[f'p{point}'])}" for point in POINTS)
        share = percent(parts["nonzero"] / max(parts["total"], 1))
        yield f"all {name} whose gradient is not 0 ({share} of them): {points}"


def _suggested(found: Mapping[str, Any], info: ModeInfo) -> Iterator[str]:
    suggested = found["suggested"]
    if suggested is None:
        yield (
            "No threshold can be suggested: no gradient after the warm-up was finite and above 0. "
            "Try a lower optimizer.lr, or fewer calibrate.steps."
        )
    else:
        start, low, high = (f"{suggested[key]:g}" for key in ("start", "low", "high"))
        mode = found["mode"]
        why = ["the p90", "half to ten times the mean"]
        if (parts := info.parts) is not None:
            clips = [percent(share) for share in info.shares]
            why = [f"clips {clips[0]} of these {parts}", f"clips {clips[1]} to {clips[2]}"]
        yield f"clip.threshold to begin with, for clip={mode}: {start} ({why[0]})"
        yield f"range worth a sweep: {low} to {high} ({why[1]})"
    yield ""
