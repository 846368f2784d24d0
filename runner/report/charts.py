"""All charts of the page, and those over optimizer steps: losses, norms, what clipping did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from runner.config.modes import ModeInfo
from runner.report.findings import Findings, Group, find, scaled_note
from runner.report.look import SMOOTHING, rounded
from runner.report.metric import metric_charts, rate_charts
from runner.report.norms import heat_maps, threshold_charts
from runner.report.plotting import (
    Chart,
    Facet,
    Trace,
    axis,
    chart,
    crosses,
    facets,
    floats,
    kept,
    limits,
    line,
    means,
    rolling_mean,
    spans,
    whole,
)
from runner.report.run import EMPTY, Floats, Run, Series
from runner.report.sweep import read
from runner.run_folder import keys

# A diverging run ends many decades above the others; the axis ends this factor above the start.
_HEADROOM = 4.0
# Values that span more than this factor get a logarithmic axis.
_DECADES = 5.0
# A curve of at most so many points shows each as a dot; above so many curves, only the nearest
# one is read off.
_DOTS, _COMPARED = 30, 20


@dataclass(frozen=True)
class Look:
    """How a chart over steps is drawn."""

    title: str
    share: bool = False
    percent: bool = False
    log: bool | None = None
    smooth: bool = False
    behind: bool = False
    ceiling: bool = False


Sections = list[tuple[str, list[Chart], str | None]]
"""Heading, charts, and a note on what is left out."""


def figures(folder: Path | str) -> dict[str, go.Figure]:
    """Return the charts of the page by name, such as ``eval-loss``, as figures of plotly."""
    found = find(read(Path(folder)))
    return {one.key: one.figure for _, charts, _ in sections(found) for one in charts}


def sections(found: Findings) -> Sections:
    """Return the charts of the page in order, without sections that have none."""
    maps, left = heat_maps(found)
    every: list[tuple[str, Iterable[Chart], str | None]] = [
        ("Metric", [*metric_charts(found), *rate_charts(found)], None),
        ("Loss", loss_charts(found.groups), None),
        ("Gradient norm and clipping", clip_charts(found.groups), None),
        ("Choosing a threshold", threshold_charts(found), None),
        ("By parameter", maps, left),
    ]
    listed = [(title, list(charts), note) for title, charts, note in every]
    return [section for section in listed if section[1]]


def loss_charts(groups: Sequence[Group]) -> Iterator[Chart]:
    """Yield charts of the evaluations and of the training loss that runs recorded."""
    look = Look("evaluation loss", ceiling=True)
    note = f"{keys.EVAL_LOSS}, measured on held-out data."
    yield from _chart("eval-loss", "Evaluation loss", note, groups, keys.EVAL_LOSS, look)
    look = Look("accuracy", share=True, percent=True)
    note = f"{keys.EVAL_ACCURACY}, measured on held-out data."
    yield from _chart("eval-accuracy", "Accuracy", note, groups, keys.EVAL_ACCURACY, look)
    note = "Bold: mean over the steps around. Faint: every step, thinned so that spikes stay."
    look = Look("training loss", smooth=True, behind=True, ceiling=True)
    yield from _chart("loss", "Training loss", note, groups, keys.TRAIN_LOSS, look)


def clip_charts(groups: Sequence[Group]) -> Iterator[Chart]:
    """Yield, for each mode, charts of ‖G‖, of how much clipping changed, and of the coefficient."""
    modes = facets(groups)
    for facet in modes:
        note = f"Before clipping; bold: geometric mean. {facet.info.note}"
        note += scaled_note(facet.groups)
        look = Look("‖G‖", log=True, smooth=True, behind=True)
        name = f"Gradient norm ‖G‖{facet.suffix}"
        yield from _chart(f"norm-{facet.mode}", name, note, facet.groups, norm, look, groups, facet)
    for facet in modes:
        parts = facet.info.parts
        name = f"Share of {parts} clipped" if parts else "Clip ratio"
        note = f"Share of the {parts or 'steps'} that clipping changed"
        note += ", mean over the steps around."
        if parts:
            note += f" Nearly every step has some of its {parts} clipped, so steps are not counted."
        pick = keys.CLIP_FRACTION if parts else keys.CLIP_RATIO
        look = Look(f"{parts or 'steps'} clipped", share=True, percent=True, smooth=True)
        key = f"{'fraction' if parts else 'ratio'}-{facet.mode}"
        yield from _chart(key, name + facet.suffix, note, facet.own, pick, look)
    for facet in modes:
        note = "‖G‖ after clipping ÷ before, mean over the steps around: 1 leaves the gradient as "
        note += "it is, 0.1 takes nine tenths of its length."
        look = Look(keys.CLIP_COEF, share=True, smooth=True)
        name = f"Coefficient{facet.suffix}"
        yield from _chart(f"coef-{facet.mode}", name, note, facet.own, keys.CLIP_COEF, look)
        if not _in_norms(facet.info):
            note, look = "The threshold of each step.", Look("threshold")
            name = f"Threshold{facet.suffix}"
            yield from _chart(f"threshold-{facet.mode}", name, note, facet.own, moving, look)
    note = "Estimated batch size at which noise and signal of the gradient are equally large."
    look = Look("samples", smooth=True, behind=True)
    yield from _chart("noise", "Gradient noise scale", note, groups, keys.NOISE_SCALE, look)


def norm(run: Run) -> Series:
    """Return ‖G‖ of each row, or the highest since the row before if rows skip steps."""
    spaced = run.config.get("log.interval", 1) not in (1, None)
    scaled, highest = run.of(keys.GRAD_NORM_SCALED), run.of(keys.GRAD_NORM_MAX)
    return highest if spaced and len(highest) and not len(scaled) else run.limited


def moving(run: Run) -> Series:
    """Return the thresholds of a run's steps; empty if they are all the same."""
    one = run.of(keys.CLIP_THRESHOLD)
    return one if len(one.finite) and np.ptp(one.finite) else EMPTY


def _named(group: Group, run: Run) -> str:
    """Return the name of a run in a chart: its setting, and its number if there are several."""
    return group.label if len(group.runs) == 1 else f"{group.label} · run {run.number}"


def _chart(
    key: str,
    title: str,
    note: str,
    groups: Sequence[Group],
    of: str | Callable[[Run], Series],
    look: Look,
    among: Sequence[Group] = (),
    facet: Facet | None = None,
) -> Iterator[Chart]:
    """Yield a chart of one series of each run, unless no run recorded it."""
    pick = of if callable(of) else partial(Run.of, key=of)
    found = [(group, run, one) for group in groups for run in group.runs if len(one := pick(run))]
    if not found:
        return
    last = max(float(one.steps[-1]) for *_, one in found)
    buckets = min(400, max(60, 24_000 // len(found)))
    compared = [(group, run) for group in (among or groups) for run in group.runs]
    values = [_before_lost(run, pick(run)) for _, run in compared]
    log = spans(values, _DECADES) if look.log is None and not look.share else bool(look.log)
    traces = [one for of_run in found for one in _curves(*of_run, look, log, buckets)]
    traces.sort(key=lambda trace: trace.get("hoverinfo") != "skip")  # bold curves are drawn last
    for group in facet.own if facet else ():
        traces += _levels(group, last) if _in_norms(group.info) else ()
    crossed = [one for of_run in found for one in _lost(*of_run)]
    note += " × marks the first value that is not a number." if crossed else ""
    if look.ceiling:
        values = _below_ceiling(values)
    for group, run in compared if facet else ():
        if _in_norms(group.info):
            values += [moving(run).finite]
        if group.info.limits_norm:
            values += [np.asarray([group.threshold or np.nan])]
    scales = {"linear": (0.0, 1.02) if look.share else limits(values, False)}
    if log or any((one > 0).any() for one in values):
        scales["log"] = limits(values, True)
    kind = "log" if log else "linear"
    y = axis(look.title, scales[kind], log=log, percent=look.percent)
    x = axis("optimizer step", (0.0, last * 1.01 or 1.0), tickformat=",d", showgrid=False)
    meta = {"scales": scales, "steps": True} | ({"smooth": kind} if look.smooth else {})
    hover = "x unified" if len(found) <= _COMPARED else "closest"
    yield chart(key, title, note, traces + crossed, x, y, meta=meta, hovermode=hover)


def _curves(
    group: Group, run: Run, one: Series, look: Look, log: bool, buckets: int
) -> Iterator[Trace]:
    """Yield the mean of a series over ranges of steps, and the series itself behind it."""
    xs, ys = _thinned(one, buckets)
    of = partial(line, group, name=_named(group, run), run=run.number)
    if look.behind:
        yield of(xs, ys, line={"width": 0.8}, opacity=0.3, hoverinfo="skip")
    more: dict[str, Any] = {"marker": {"size": 5}}
    if look.smooth:
        steps, mean, highest = means(one.steps, one.values, buckets, log)
        width = max(1, round(SMOOTHING * len(mean)))
        xs, ys = whole(steps), floats(rolling_mean(mean, width, log))
        more["customdata"] = floats(np.column_stack((mean, highest)))
        # Of a norm, the single steps matter that a mean hides.
        single = " · max %{customdata[1]:.4~g}" if look.log else ""
        more["hovertemplate"] = "%{y:.4~g}" + single
    mode = "lines+markers" if len(xs) <= _DOTS else "lines"
    yield of(xs, ys, line={"dash": group.dash}, mode=mode, showlegend=True, **more)


def _thinned(one: Series, buckets: int) -> tuple[NDArray[Any], NDArray[Any]]:
    at = kept(one.values, buckets)
    return whole(one.steps[at]), floats(one.values[at])


def _in_norms(info: ModeInfo) -> bool:
    """Return whether the thresholds of a mode are limits of ‖G‖, which its chart shows."""
    moves = info.follows == "norms" or (info.follows == "steps" and info.unit == "‖G‖")
    return moves or info.limits_norm


def _levels(group: Group, last: float) -> Iterator[Trace]:
    """Yield the threshold of a setting as a dashed line; one that moves as a curve for each run."""
    stroke = {"width": 1.3, "dash": "6px,4px"}
    name = f"threshold of {group.label}"
    moved = [(run, one) for run in group.runs if len(one := moving(run))]
    for run, one in moved:
        yield line(group, *_thinned(one, 400), name, line=stroke | {"shape": "hv"}, run=run.number)
    if not moved and group.info.limits_norm and group.threshold is not None:
        level = [group.threshold] * 2
        yield line(group, [0, last * 1.01], level, name, line=stroke, hoverinfo="skip")


def _lost(group: Group, run: Run, one: Series) -> Iterator[Trace]:
    """Yield a mark at the first value that is not finite."""
    gone = np.flatnonzero(~np.isfinite(one.values))
    if not len(gone):
        return
    step, value = one.steps[gone[0]], rounded(float(one.values[gone[0]]))
    name = f"{_named(group, run)}: {value} at step {rounded(float(step), 9)}"
    if len(gone) > 1:
        name += f", and at {len(gone) - 1} more of the recorded steps"
    yield crosses(group, [step], [name], run=run.number)


def _before_lost(run: Run, one: Series) -> Floats:
    """Return the finite values from before a run diverged: later ones would flatten all others."""
    lost = run.diverged_at
    before = one.steps < (np.inf if lost is None else lost)
    return Series(one.steps[before], one.values[before]).finite


def _below_ceiling(values: Sequence[Floats]) -> list[Floats]:
    """Return the values without those that lie far above the start of every run."""
    # Short series, such as evaluations, begin with their first value alone.
    starts = [float(np.median(v[: max(1, min(10, len(v) // 20))])) for v in values if len(v)]
    top = _HEADROOM * max(starts, default=np.inf)
    return [v[v <= top] if top > 0 else v for v in values]
