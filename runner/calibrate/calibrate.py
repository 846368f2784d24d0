"""Measure gradients without clipping, and suggest thresholds.

Pascanu, Mikolov and Bengio 2013 (arXiv 1211.5063, section 3.2) observe the norm over many updates:
thresholds of half to ten times its mean still converge. Those of a mode that clips elements or
units follow from the elements or units of all steps: the largest tells nothing about the others.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.clip import build as build_mode
from runner.clip.mode import NEVER
from runner.config.modes import MODES, ModeInfo, info_of
from runner.config.notation import Duration, percent, plural, rounded
from runner.config.schema import RunConfig
from runner.gradients import Layout, transfer
from runner.run_folder import keys
from runner.telemetry.guidance import FEWEST, before_a_run
from runner.telemetry.sinks import Sink
from runner.train import build
from runner.train.build import make_trainer
from runner.train.run import effect_in

POINTS = (50, 75, 90, 95, 99)
COLUMNS = ("mean", *(f"p{point}" for point in POINTS), "max")


# A tally has bounds with these decimal exponents, and this many bins a decade, each 6 % wide.
LOWEST = -16
HIGHEST = 12
PER_DECADE = 40
BINS = (HIGHEST - LOWEST) * PER_DECADE


class Tally:
    """Counts elements or units in bins, on their device, without waiting for the host.

    Zeros and values beyond the bounds count in the total alone, and NaN nowhere.
    """

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip
        self._counts: Tensor | None = None  # of each bin, and of everything
        self._step: Tensor | None = None

    def add(self, values: Tensor, weight: float) -> None:
        """Count ``values`` of the current step."""
        if self._skip > 0 or values.numel() == 0:
            return
        wide = transfer.widest(values.device)
        if self._step is None:
            self._step = torch.zeros(BINS + 1, dtype=wide, device=values.device)
        # A float32 bin would not count beyond 2^24, and a wide copy of all takes much memory.
        for part in torch.split(values.detach().reshape(-1), 2**24):
            self._step[:-1] += torch.histc(part.to(wide).log10(), BINS, LOWEST, HIGHEST) * weight
            self._step[-1] += (part == part).sum().to(wide) * weight

    def end_step(self, norm: Tensor) -> None:
        """Keep the counts of the current step, unless its gradient was not finite."""
        self._skip -= 1
        step = self._step
        self._step = None
        if step is not None:
            counted = step * norm.isfinite().to(step)
            self._counts = counted if self._counts is None else self._counts + counted

    def gather(self, layout: Layout) -> tuple[list[float], float]:
        """Return the counts of each bin and of everything, over all ranks; one collective."""
        counts = self._counts
        if counts is None:
            wide = transfer.widest(layout.device)
            counts = torch.zeros(BINS + 1, dtype=wide, device=layout.device)
        *everywhere, total = layout.sum(counts).tolist()
        return everywhere, total


@dataclass(frozen=True)
class Histogram:
    """Histogram of the values of elements or units, with bins of equal width in log10."""

    counts: Sequence[float]
    total: float
    lowest: float
    highest: float

    def share_above(self, threshold: float) -> float:
        """Return the share of all elements or units, including zeros, above ``threshold``."""
        edges, above = self._above()
        return float(np.interp(math.log10(threshold), edges, above)) / max(self.total, 1.0)

    def largest(self, share: float) -> float:
        """Return the value that ``share`` of the nonzero ones exceed; NaN if all are zero."""
        edges, above = self._above()
        if not above[0]:
            return math.nan
        # np.interp needs increasing numbers.
        return float(10 ** np.interp(-share * above[0], -above, edges))

    def _above(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        edges = np.linspace(self.lowest, self.highest, len(self.counts) + 1)
        return edges, np.append(np.cumsum(np.asarray(self.counts)[::-1])[::-1], 0.0)


def warm_up(steps: int, configured: int | None) -> int:
    """Return the number of first steps to describe separately: a tenth, or what is configured."""
    return steps // 10 if configured is None else min(configured, steps - 1)


def distribution(values: Iterable[float]) -> dict[str, float]:
    """Return the distribution of a value over steps; NaN if no value is finite."""
    every = np.asarray(list(values), dtype=np.float64)
    finite = every[np.isfinite(every)]
    nonfinite = len(every) - len(finite)
    if not finite.size:
        finite = np.array([math.nan])
    return {
        "steps": len(every),
        "nonfinite": nonfinite,
        "mean": float(finite.mean()),
        **{f"p{point}": float(np.percentile(finite, point)) for point in POINTS},
        "max": float(finite.max()),
    }


def suggest(start: float, low: float, high: float) -> dict[str, float] | None:
    """Return thresholds with three digits; None if no gradient was finite and above 0."""
    if not all(math.isfinite(x) and x > 0 for x in (start, low, high)):
        return None
    thresholds = {"start": start, "low": low, "high": high}
    return {name: float(f"{threshold:.3g}") for name, threshold in thresholds.items()}


def would_clip(peaks: Sequence[float], threshold: float) -> float:
    """Return the share of steps whose value is above a threshold."""
    return sum(peak > threshold for peak in peaks) / max(len(peaks), 1)


def execute(config: RunConfig, sinks: Sequence[Sink]) -> dict[str, Any]:
    """Train without clipping for ``calibrate.steps``, or to the end of a shorter run."""
    clip = config.clip
    end = end_of(config)
    threshold = None if clip.threshold is None else NEVER
    mode = build_mode(clip.options, **clip.options.unclipped, threshold=threshold)
    tally = mode.tally = Tally(warm_up(end.value, config.calibrate.warmup_steps))
    trainer = make_trainer(config, sinks, mode=mode, max_duration=end, evaluates=False)
    trainer.fit()
    meter = trainer.state.meter
    counts, total = tally.gather(trainer.optimizer.layout)
    first = warm_up(len(meter.norms), config.calibrate.warmup_steps)
    effect = effect_in(trainer, distribution(meter.norms[first:])["p50"])
    return {
        "matters": before_a_run(meter.norms[first:], effect),
        "parts": {"counts": counts, "total": total, "lowest": LOWEST, "highest": HIGHEST},
        "norms": [*meter.norms],
        "peaks": [*meter.max_stats],
        "loss": meter.last[keys.TRAIN_LOSS],
    }


def end_of(config: RunConfig) -> Duration:
    """Return the duration of a calibration: ``calibrate.steps``, or a shorter run's duration."""
    whole = build.steps_of(config, build.make_data(config.data))
    steps = config.calibrate.steps
    return Duration(steps if whole is None else min(steps, whole), "ba")


def describe(
    config: RunConfig, measured: Mapping[str, Any], words: Sequence[str]
) -> dict[str, Any]:
    """Return the content of ``calibrate.json``; ``measured`` is the result of ``execute``."""
    clip = config.clip
    mode, info = (clip.mode, clip.info) if clip.info.clips else ("norm", MODES["norm"].info)
    norms = measured["norms"]
    peaks = measured["peaks"]
    first = warm_up(len(norms), config.calibrate.warmup_steps)
    parts = None if info.parts is None else Histogram(**measured["parts"])
    if parts is None:
        of_peaks = distribution(peaks[first:])
        suggested = suggest(of_peaks["p90"], of_peaks["mean"] / 2, of_peaks["mean"] * 10)
    else:
        start, low, high = (parts.largest(share) for share in info.shares)
        suggested = suggest(start, low, high)
    thresholds = _thresholds_to_list(config, info, suggested)
    described: dict[str, Any] = {
        "words": list(words),
        "matters": measured["matters"],
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
        described["peak"] = _apart(peaks, first)
    elif any(peak < norm for peak, norm in zip(peaks, norms, strict=True)):
        # clip.scales=auto leaves some gradients out.
        described["norm_scaled"] = _apart(peaks, first)
    if parts is not None:
        points = {f"p{point}": parts.largest(1 - point / 100) for point in POINTS}
        described["parts"] = {"total": parts.total, "nonzero": math.fsum(parts.counts), **points}
        described["would_clip_parts"] = {str(t): parts.share_above(t) for t in thresholds}
    return described | {
        "suggested": suggested,
        "would_clip": {str(t): would_clip(peaks, t) for t in thresholds},
        "next": commands(words, mode, suggested) if suggested else {},
        "norms": norms,
        "peaks": peaks,
    }


def _thresholds_to_list(
    config: RunConfig, info: ModeInfo, suggested: Mapping[str, float] | None
) -> list[float]:
    """Return published and configured thresholds, and those of the next commands, rising."""
    thresholds = {value for value, _ in info.published}
    thresholds |= {*info.grid, *config.clip.what_if}
    if config.clip.threshold is not None:
        thresholds.add(config.clip.threshold)
    if suggested is not None:
        thresholds |= {*_grid(suggested)}
    return sorted(thresholds)


def _apart(values: Sequence[float], first: int) -> dict[str, Any]:
    """Return the distributions of the steps of the warm-up, and of all later steps."""
    return {
        "warm_up": distribution(values[:first]),
        "after_warm_up": distribution(values[first:]),
    }


def commands(words: Sequence[str], mode: str, suggested: Mapping[str, float]) -> dict[str, str]:
    """Return commands of a run and of a sweep to try next, for the arguments ``words``.

    The sweep covers the suggested range, from end to end.
    """
    settled = ("clip", "clip.threshold", "clip.what_if")
    named = {word: word.lstrip("+~").partition("=")[0] for word in words}
    base = [w for w in words if named[w] not in settled and not named[w].startswith("calibrate.")]
    if "clip._target_" not in named.values():
        base.append(f"clip={mode}")
    start = suggested["start"]
    grid = _grid(suggested)
    what_if = ",".join(f"{threshold:g}" for threshold in grid if threshold != start)
    swept = ",".join(f"{threshold:g}" for threshold in grid)
    runner = ["python", "-m", "runner"]
    run = [*runner, *base, f"clip.threshold={start:g}", f"clip.what_if=[{what_if}]"]
    sweep = [*runner, "-m", *base, f"clip.threshold={swept}"]
    return {"run": shlex.join(run), "sweep": shlex.join(sweep)}


def _grid(suggested: Mapping[str, float]) -> list[float]:
    """Return the range, the threshold to begin with, and the geometric means between them."""
    low, middle, high = sorted(suggested.values())
    thresholds = [low, math.sqrt(low * middle), middle, math.sqrt(middle * high), high]
    return sorted({float(f"{threshold:.3g}") for threshold in thresholds})


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of a calibration, given the content of its file."""
    info = info_of(found["mode"], found["mode_info"])
    steps = found["steps"]
    first = found["warmup_steps"]
    yield found["matters"]
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
        of_parts = f"   {percent(parts[threshold]):>12}" if parts else ""
        yield f"{threshold:>9}   {percent(share):>12}{of_parts}"
    if found["next"]:
        yield from ("\nNext", *(f"  {command}" for command in found["next"].values()))


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
    yield " " * width + "".join(f"{column:>9}" for column in COLUMNS)
    for label, values in rows:
        yield f"{label:<{width}}" + "".join(f"{rounded(values[column]):>9}" for column in COLUMNS)
    if "parts" in found:
        parts = found["parts"]
        points = "  ".join(f"p{point} {rounded(parts[f'p{point}'])}" for point in POINTS)
        share = percent(parts["nonzero"] / max(parts["total"], 1))
        yield f"all {info.parts} whose gradient is not 0 ({share} of them): {points}"


def _suggested(found: Mapping[str, Any], info: ModeInfo) -> Iterator[str]:
    if found["suggested"] is None:
        yield "no threshold to suggest: no gradient after the warm-up was finite and above 0"
        return
    start, low, high = (f"{found['suggested'][key]:g}" for key in ("start", "low", "high"))
    why = ["the p90", "half to ten times the mean"]
    if info.parts is not None:
        clips = [percent(share) for share in info.shares]
        why = [f"clips {clips[0]} of these {info.parts}", f"clips {clips[1]} to {clips[2]}"]
    yield f"clip.threshold to begin with, for clip={found['mode']}: {start} ({why[0]})"
    yield f"range worth a sweep: {low} to {high} ({why[1]})"
