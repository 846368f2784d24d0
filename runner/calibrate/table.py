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
    info = info_of(found["mode"], found["mode_info"])
    steps, first = found["steps"], found["warmup_steps"]
    yield f"{plural(steps, 'step')} without clipping, the first {first} as warm-up"
    if found["nonfinite"]:
        yield f"{found['nonfinite']} of them had a gradient of NaN or inf, and are left out below"
    if steps - first < FEWEST:
        few = plural(steps - first, "step")
        yield f"only {few} measured after the warm-up: too few to rely on what follows"
    if not math.isfinite(found["loss"]):
        yield "the loss diverged without clipping: later norms are not representative"
    yield from ("", *_distributions(found, info), "", *_suggested(found, info), "")
    parts = found.get("would_clip_parts")
    head = "threshold   share of the steps it would have clipped"
    yield head + (f", and of their {info.parts}" if parts else "")
    for threshold, share in found["would_clip"].items():
        own = f"   {percent(parts[threshold]):>12}" if parts else ""
        yield f"{threshold:>9}   {percent(share):>12}{own}"
    if found["next"]:
        yield "\nNext"
        yield from (f"  {command}" for command in found["next"].values())


def _distributions(found: Mapping[str, Any], info: ModeInfo) -> Iterator[str]:
    """Yield a line for each distribution: ‖G‖, and the values that other modes compare with λ."""
    names = {"norm": "‖G‖", "norm_scaled": "‖G‖ without Muon's matrices"}
    names["peak"] = f"largest {info.stat}"
    rows = [
        (f"{name}, {when}", found[key][part])
        for key, name in names.items()
        for part, when in (("warm_up", "warm-up"), ("after_warm_up", "then"))
        if key in found and found[key][part]["steps"]
    ]
    width = max(len(label) for label, _ in rows)
    yield " " * width + "".join(f"{column:>10}" for column in COLUMNS)
    for label, one in rows:
        yield f"{label:<{width}}" + "".join(f"{rounded(one[column]):>10}" for column in COLUMNS)
    if "parts" in found:
        parts = found["parts"]
        points = "  ".join(f"p{point} {rounded(parts[f'p{point}'])}" for point in POINTS)
        share = percent(parts["nonzero"] / max(parts["total"], 1))
        yield f"all {info.parts} whose gradient is not 0 ({share} of them): {points}"


def _suggested(found: Mapping[str, Any], info: ModeInfo) -> Iterator[str]:
    if found["suggested"] is None:
        yield (
            "No threshold can be suggested: no gradient after the warm-up was finite and above 0. "
            "Try a lower optimizer.lr, or fewer calibrate.steps."
        )
        return
    start, low, high = (f"{found['suggested'][key]:g}" for key in ("start", "low", "high"))
    why = ["the p90", "half to ten times the mean"]
    if info.parts is not None:
        clips = [percent(share) for share in info.shares]
        why = [f"clips {clips[0]} of these {info.parts}", f"clips {clips[1]} to {clips[2]}"]
    yield f"clip.threshold to begin with, for clip={found['mode']}: {start} ({why[0]})"
    yield f"range worth a sweep: {low} to {high} ({why[1]})"
