"""Values over steps: the mean of each setting and a band over its seeds; single seeds beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.report import figure
from runner.report.figure import Chart, Entry, Trace
from runner.report.look import rounded
from runner.report.run import Floats, Series

_DOTS = 30  # most points of a curve that are dots
_POINTS = 24_000  # of all curves of a chart together, about


class Curve(NamedTuple):
    """The series of a run; the part up to ``joins`` belongs to the run it was branched from."""

    entry: Entry
    run: str
    series: Series
    joins: float | None = None


class Level(NamedTuple):
    """A threshold: one value for all steps, or a series that moves."""

    entry: Entry
    run: str | None
    value: float | Series


class Mark(NamedTuple):
    """A step of a run to be marked on its curve, such as one that was skipped."""

    entry: Entry
    run: str
    step: float
    value: float
    text: str


def draw(
    *,
    name: str,
    title: str,
    note: str,
    axis: str,
    curves: Sequence[Curve],
    levels: Sequence[Level] = (),
    marks: Sequence[Mark] = (),
    smooth: bool = False,
    percent: bool = False,
    share: bool = False,
    log: bool | None = None,
    until: Sequence[Floats] = (),
    height: int = 330,
) -> Chart:
    """Draw curves over steps.

    Args:
        smooth: draw means over the steps around, and beside them every step of each seed.
        share: the values are shares: the axis goes from 0 to 1, and has no logarithm.
        log: whether the axis is logarithmic; None: if the values span decades.
        until: values that the axis encloses; the values of diverged runs may lie outside.
    """
    first = _first(curves)
    last = max(float(curve.series.steps[-1]) for curve in curves)
    values = [*(until or [curve.series.finite for curve in curves]), *_of_parents(curves, first)]
    if log is None:
        log = not share and figure.spans(values, 5.0)
    traces = [
        *_settings(curves, smooth, log),
        *(_level(level, first, last) for level in levels),
        *_joins(curves),
        *_marks(marks),
    ]
    lost = [trace for curve in curves for trace in _lost(curve)]
    scales, kind = _scales(values, log, share=share, percent=percent)
    margin = 0.01 * (last - first) or 1.0
    return figure.chart(
        name,
        title,
        note + (" × The first value that is not a number." if lost else ""),
        [*traces, *lost],
        figure.axis("step", (first, last + margin), tickformat=",d", showgrid=False),
        figure.axis(axis, scales[kind], log=kind == "log", percent=percent),
        meta={"scales": scales, "steps": True},
        height=height,
    )


def _scales(
    values: Sequence[Floats], log: bool, *, share: bool, percent: bool
) -> tuple[dict[str, tuple[float, float]], str]:
    """Return the ends of the vertical axis by its kind, and the kind that is shown first."""
    if share:
        return {"linear": (0.0, 1.02)}, "linear"
    scales, kind = figure.scales(values, log)
    return ({"linear": scales["linear"]}, "linear") if percent else (scales, kind)


def _of_parents(curves: Sequence[Curve], first: float) -> list[Floats]:
    """Return the values of the parents of branched runs that the axis shows."""
    values = []
    for curve in curves:
        if curve.joins is not None:
            shown = (curve.series.steps >= first) & (curve.series.steps <= curve.joins)
            values.append(curve.series.values[shown])
    return values


def _settings(curves: Sequence[Curve], smooth: bool, log: bool) -> list[Trace]:
    """Return the curves of single seeds, and over them the means of settings."""
    by_setting: dict[int, list[Curve]] = {}
    for curve in curves:
        by_setting.setdefault(curve.entry.index, []).append(curve)
    buckets = min(400, max(60, _POINTS // len(curves)))
    traces: list[Trace] = []
    for members in by_setting.values():
        traces += _seeds(members, smooth, len(curves) == 1, buckets)
    for members in by_setting.values():
        traces += _means(members, smooth, log, buckets)
    return traces


def _first(curves: Sequence[Curve]) -> float:
    """Return where the axis begins: at 0, or shortly before the first branch."""
    joins = [curve.joins for curve in curves]
    begun = [join for join in joins if join is not None]
    if len(begun) < len(curves):
        return 0.0
    last = max(float(curve.series.steps[-1]) for curve in curves)
    return max(0.0, min(begun) - 0.25 * (last - min(begun)))


def _seeds(members: Sequence[Curve], smooth: bool, single: bool, buckets: int) -> list[Trace]:
    """Return the curve of each run, which the page shows on demand."""
    if len(members) == 1 and not smooth:
        return []  # its mean is the same curve
    traces = []
    for curve in members:
        steps, values = figure.thinned(curve.series, buckets)
        style: Trace = {"line": {"width": 0.8}, "opacity": 0.45, "run": curve.run}
        hover = {"hoverinfo": "skip"} if smooth else {}
        name = f"{curve.entry.label}, run {curve.run}"
        demanded = {"meta": {"seed": not single}}
        traces.append(figure.line(curve.entry, steps, values, name, **style, **hover, **demanded))
    return traces


def _means(members: Sequence[Curve], smooth: bool, log: bool, buckets: int) -> list[Trace]:
    """Return the mean curve of a setting, over its band."""
    entry = members[0].entry
    steps, low, middle, high = over_seeds(members, smooth, smooth and log, buckets)
    traces = []
    run = members[0].run if len(members) == 1 else None
    if len(members) > 1:
        xs = np.concatenate([steps, steps[::-1]])
        ys = np.concatenate([figure.floats(high), figure.floats(low)[::-1]])
        area: Trace = {"fill": "toself", "fillcolor": entry.color, "hoverinfo": "skip"}
        area |= {"line": {"width": 0}, "opacity": 0.16, "meta": {"band": True}}
        finite = np.isfinite(ys)
        traces.append(figure.line(entry, xs[finite], ys[finite], entry.label, **area))
    bold: Trace = {"mode": "lines+markers" if len(steps) <= _DOTS else "lines", "run": run}
    bold |= {"marker": {"size": 5}}
    traces.append(figure.line(entry, steps, figure.floats(middle), entry.label, **bold))
    return traces


def over_seeds(
    members: Sequence[Curve], smooth: bool, log: bool, buckets: int
) -> tuple[NDArray[np.int64], Floats, Floats, Floats]:
    """Return steps, and the lowest, mean and highest value over seeds; geometric if ``log``."""
    curves = []
    for curve in members:
        if smooth:
            parts = [_smoothed(part, buckets, log) for part in _parts(curve)]
            xs = np.concatenate([steps for steps, _ in parts])
            ys = np.concatenate([means for _, means in parts])
        else:
            kept, thin = figure.thinned(curve.series, buckets)
            xs = kept.astype(np.float64)
            ys = thin.astype(np.float64)
        curves.append((xs, ys))
    longest = max(curves, key=lambda curve: len(curve[0]))[0]
    table = np.full((len(curves), len(longest)), np.nan)
    for row, (xs, ys) in zip(table, curves, strict=True):
        inside = (longest >= xs[0]) & (longest <= xs[-1])
        row[inside] = np.interp(longest[inside], xs, ys)
    counts = np.isfinite(table).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = np.log(table) if log else table
        sums = np.where(np.isfinite(scaled), scaled, 0.0).sum(axis=0)
        means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        middle = np.exp(means) if log else means
    return longest.astype(np.int64), np.fmin.reduce(table), middle, np.fmax.reduce(table)


def _parts(curve: Curve) -> list[Series]:
    """Return the series before and after a branch, over whose beginning no mean goes."""
    if curve.joins is None:
        return [curve.series]
    before = curve.series.steps <= curve.joins
    parts = []
    for kept in (before, ~before):
        if kept.any():
            parts.append(Series(curve.series.steps[kept], curve.series.values[kept]))
    return parts


def _smoothed(series: Series, buckets: int, log: bool) -> tuple[Floats, Floats]:
    steps, _, means = figure.smoothed(series, buckets, log)
    return steps, means


def _level(level: Level, first: float, last: float) -> Trace:
    """Return a threshold as a dashed line or, if it moves, a curve."""
    stroke = {"width": 1.3, "dash": "6px,4px"}
    name = f"threshold of {level.entry.label}"
    shown: dict[str, Any] = {"run": level.run, "meta": {"level": True}}
    if isinstance(level.value, Series):
        steps, values = figure.thinned(level.value, 400)
        return figure.line(level.entry, steps, values, name, line=stroke | {"shape": "hv"}, **shown)
    ends = [first, last * 1.01]
    heights = [level.value] * 2
    return figure.line(level.entry, ends, heights, name, line=stroke, hoverinfo="skip", **shown)


def _joins(curves: Sequence[Curve]) -> list[Trace]:
    """Return a line at each step at which runs were branched."""
    traces = []
    for step in sorted({curve.joins for curve in curves if curve.joins is not None}):
        stroke = {"width": 1, "dash": "2px,3px"}
        hover: Trace = {"hovertext": [f"branched after step {step:,.0f}"] * 2, "hoverinfo": "text"}
        style = {"yaxis": "y2", "meta": {"join": step}, "line": stroke}
        traces.append(figure.line(None, [step, step], [0, 1], "branch", **style, **hover))
    return traces


def _marks(marks: Sequence[Mark]) -> list[Trace]:
    """Return the marked steps of each run as one trace."""
    by_run: dict[tuple[int, str], list[Mark]] = {}
    for mark in marks:
        by_run.setdefault((mark.entry.index, mark.run), []).append(mark)
    traces = []
    for (_, run), marked in by_run.items():
        entry = marked[0].entry
        style = {"symbol": "triangle-up-open", "size": 8, "color": entry.color}
        traces.append(
            figure.trace(
                entry,
                run,
                [mark.step for mark in marked],
                [mark.value for mark in marked],
                mode="markers",
                name=f"{entry.label}, skipped",
                marker=style,
                hovertext=[mark.text for mark in marked],
                hoverinfo="text",
            )
        )
    return traces


def _lost(curve: Curve) -> list[Trace]:
    """Return a cross at the first value that is not finite."""
    lost = np.flatnonzero(~np.isfinite(curve.series.values))
    if not len(lost):
        return []
    step = float(curve.series.steps[lost[0]])
    value = rounded(float(curve.series.values[lost[0]]))
    text = f"{curve.entry.label}, run {curve.run}: {value} at step {rounded(step, 9)}"
    text += f", and at {len(lost) - 1} more of the recorded steps" if len(lost) > 1 else ""
    return [figure.cross(curve.entry, curve.run, step, text)]
