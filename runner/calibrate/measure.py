"""The work of one rank in a calibration, and what follows from what it measured."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from runner.calibrate.distribution import (
    POINTS,
    Histogram,
    distribution,
    suggest,
    warm_up,
    would_clip,
)
from runner.clip import build as build_mode
from runner.clip.mode import NEVER
from runner.clip.tally import HIGHEST, LOWEST, Tally
from runner.compose.jobs import key_of
from runner.config.duration import Duration
from runner.config.modes import MODES
from runner.config.schema import RunConfig
from runner.run_folder import keys
from runner.telemetry.sinks import Sink
from runner.train import build
from runner.train.job import make_trainer


def execute(config: RunConfig, sinks: Sequence[Sink]) -> dict[str, Any]:
    """Train without clipping for ``calibrate.steps``, or to the end of a shorter run."""
    clip, end = config.clip, end_of(config)
    threshold = None if clip.threshold is None else NEVER
    options = {**clip.options, **clip.described.unclipped, "threshold": threshold}
    mode = build_mode(clip.kind, **options)
    tally = mode.tally = Tally(warm_up(end.value, config.calibrate.warmup_steps))
    trainer = make_trainer(config, sinks, mode=mode, max_duration=end, evaluates=False)
    trainer.fit()
    meter = trainer.state.meter
    counts, total = tally.gather(trainer.optimizer.layout)
    return {
        "parts": {"counts": counts, "total": total, "lowest": LOWEST, "highest": HIGHEST},
        "norms": [*meter.norms],
        "peaks": [*meter.max_stats],
        "loss": meter.last[keys.TRAIN_LOSS],
    }


def end_of(config: RunConfig) -> Duration:
    """Return the duration of a calibration: ``calibrate.steps``, or that of a shorter run."""
    whole = build.steps_of(config, build.make_data(config.data))
    steps = config.calibrate.steps
    return Duration(steps if whole is None else min(steps, whole), "ba")


def describe(
    config: RunConfig, measured: Mapping[str, Any], words: Sequence[str]
) -> dict[str, Any]:
    """Return the content of ``calibrate.json``; ``measured`` is the result of ``execute``."""
    clip = config.clip
    mode, info = (clip.mode, clip.info) if clip.info.clips else ("norm", MODES["norm"].info)
    norms, peaks = measured["norms"], measured["peaks"]
    first = warm_up(len(norms), config.calibrate.warmup_steps)
    parts = None if info.parts is None else Histogram(**measured["parts"])
    if parts is None:
        measured_norms = distribution(peaks[first:])
        mean = measured_norms["mean"]
        suggested = suggest(measured_norms["p90"], mean / 2, mean * 10)
    else:
        suggested = suggest(*map(parts.largest, info.shares))
    start = suggested["start"] if suggested else None
    own = () if clip.threshold is None else (clip.threshold,)
    studied = {*(value for value, _ in info.published), *info.grid}
    listed = sorted({*studied, *clip.what_if, *own, *(suggested or {}).values()})
    found: dict[str, Any] = {
        "words": list(words),
        "mode": mode,
        "mode_info": asdict(info),
        "norm_type": clip.norm_type,
        "steps": len(norms),
        "warmup_steps": first,
        "nonfinite": distribution(norms)["nonfinite"],
        "loss": measured["loss"],
        "norm": _apart(norms, first),
    }
    if info.unit != "‖G‖":
        found["peak"] = _apart(peaks, first)
    elif any(peak < norm for peak, norm in zip(peaks, norms, strict=True)):
        found["norm_scaled"] = _apart(peaks, first)  # clip.scales=auto leaves some gradients out
    if parts is not None:
        points = {f"p{point}": parts.largest(1 - point / 100) for point in POINTS}
        found["parts"] = {"total": parts.total, "nonzero": parts.nonzero, **points}
        found["would_clip_parts"] = {str(one): parts.share_above(one) for one in listed}
    return found | {
        "suggested": suggested,
        "would_clip": {str(one): would_clip(peaks, one) for one in listed},
        "next": commands(words, mode, start),
        "norms": norms,
        "peaks": peaks,
    }


def _apart(values: Sequence[float], first: int) -> dict[str, Any]:
    return {
        "warm_up": distribution(values[:first]),
        "after_warm_up": distribution(values[first:]),
    }


def commands(words: Sequence[str], mode: str, start: float | None) -> dict[str, str]:
    """Return commands of a run and of a sweep to try next, for the arguments ``words``."""
    if start is None:
        return {}
    settled = ("clip", "clip.threshold", "clip.what_if")
    named = {word: key_of(word) for word in words}
    base = [w for w in words if named[w] not in settled and not named[w].startswith("calibrate.")]
    if "clip._target_" not in named.values():
        base.append(f"clip={mode}")
    grid = [float(f"{start * factor:.3g}") for factor in (0.25, 0.5, 1, 2, 4)]
    others = ",".join(f"{x:g}" for x in grid if x != start)
    each = ",".join(f"{x:g}" for x in grid)
    runner = ["python", "-m", "runner"]
    run = [*runner, *base, f"clip.threshold={start:g}", f"clip.what_if=[{others}]"]
    sweep = [*runner, "-m", *base, f"clip.threshold={each}"]
    return {"run": shlex.join(run), "sweep": shlex.join(sweep)}
