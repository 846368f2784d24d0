"""What all charts have in common: frame, axes, marks, and curves with fewer points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from runner.report.look import INK, NEUTRAL, PAPER, RULE, SMOOTHING
from runner.report.run import Floats, Series

Trace = dict[str, Any]

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
FRAME = {"l": 60, "r": 16, "t": 40, "b": 40}  # margins in pixels


@dataclass(frozen=True)
class Chart:
    """One chart of the page."""

    key: str
    title: str
    note: str
    figure: go.Figure


@dataclass(frozen=True)
class Entry:
    """What a chart shows of a setting: its name and colour, the same in all charts."""

    index: int
    label: str
    color: str


def chart(
    key: str,
    title: str,
    note: str,
    traces: Sequence[Trace],
    x: dict[str, Any],
    y: dict[str, Any],
    **layout: Any,
) -> Chart:
    """Return a chart of ``traces``; ``meta`` of its layout is for the script of the page."""
    hover = {"bgcolor": PAPER, "bordercolor": NEUTRAL, "font": {"color": INK, "size": 11}}
    common = {
        "template": go.layout.Template(),
        "title": {"text": title},
        "meta": {},
        "font": {"family": FONT, "size": 12, "color": INK},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "margin": FRAME,
        "height": 330,
        "hoverlabel": hover,
        "legend": {"tracegroupgap": 0},
        "hoversort": "value descending",
        "hovermode": "closest",
        "xaxis": x,
        "yaxis": y,
        # Marks that have no place on the vertical axis.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    }
    return Chart(key, title, note, go.Figure(list(traces), common | layout))


def axis(
    title: str, ends: tuple[float, float], *, log: bool = False, percent: bool = False, **more: Any
) -> dict[str, Any]:
    """Return an axis of plotly from ``ends[0]`` to ``ends[1]``, both above 0 if ``log``."""
    return {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "type": "log" if log else "linear",
        "range": [math.log10(end) for end in ends] if log else list(ends),
        "tickformat": ".3~%" if percent else ".6~g",
        "gridcolor": RULE,
        "linecolor": NEUTRAL,
        "zeroline": False,
        "nticks": 3 + (ends[1] > 16 * ends[0]) if log and ends[1] < 1e3 * ends[0] else 7,
        **more,
    }


def _every(values: Iterable[ArrayLike]) -> Floats:
    arrays = [np.empty(0), *(np.asarray(array, dtype=np.float64).ravel() for array in values)]
    every = np.concatenate(arrays)
    return np.asarray(every[np.isfinite(every)])


def limits(values: Iterable[ArrayLike], log: bool) -> tuple[float, float]:
    """Return ends with a margin that enclose all finite values, or the positive ones if ``log``."""
    every = _every(values)
    every = every[every > 0] if log else every
    if not every.size:
        return (0.1, 10.0) if log else (0.0, 1.0)
    low = float(every.min())
    high = float(every.max())
    if log:
        span = max(high / low, 1.5) ** 0.05
        return low / span, high * span
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def scales(values: Sequence[ArrayLike], log: bool) -> tuple[dict[str, Any], str]:
    """Return the ends of an axis on each scale, and the scale to begin with."""
    ends = {"linear": limits(values, False)}
    if log or (_every(values) > 0).any():
        ends["log"] = limits(values, True)
    return ends, "log" if log else "linear"


def spans(values: Iterable[ArrayLike], factor: float) -> bool:
    """Return whether all finite values are positive and most of them span more than ``factor``."""
    every = _every(values)
    if not every.size or every.min() <= 0:
        return False
    low, high = np.percentile(every, (2, 98))
    return bool(high / low > factor)


def floats(values: ArrayLike) -> NDArray[np.float32]:
    """Return values as float32, where NaN stands for values beyond its range."""
    array = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.abs(array) < 3e38, array, np.nan).astype(np.float32)


def trace(entry: Entry | None, run: str | None, x: Any, y: Any, **more: Any) -> Trace:
    """Return a trace that the page lifts out, dims or hides with its setting and its run."""
    owner: Trace = {}
    if entry is not None:
        owner = {"meta": {"setting": entry.index, "run": run} | more.pop("meta", {})}
    return {"type": "scatter", "x": x, "y": y, "showlegend": False, **owner, **more}


def line(entry: Entry | None, x: Any, y: Any, name: str, **more: Any) -> Trace:
    """Return a line in the color of an entry; ``more`` are attributes of the trace."""
    stroke = {"color": entry.color if entry else NEUTRAL, "width": 1.7} | more.pop("line", {})
    # With a template, plotly would show what is to be skipped.
    hover = {} if "hoverinfo" in more else {"hovertemplate": "%{y:.4~g}"}
    style = {"mode": "lines", "name": name, "line": stroke, **hover}
    return trace(entry, more.pop("run", None), x, y, **(style | more))


def point(entry: Entry, run: str | None, x: float, y: float, text: str, **marker: Any) -> Trace:
    """Return a point in the color of an entry; ``marker`` has attributes of the marker."""
    style = {"color": entry.color, "size": 9, "line": {"width": 1, "color": PAPER}} | marker
    about = {"name": entry.label, "hovertext": [text], "hoverinfo": "text"}
    return trace(entry, run, [x], [y], mode="markers", marker=style, **about)


def cross(entry: Entry, run: str | None, x: float, text: str) -> Trace:
    """Return a mark at the upper edge for a value that has no place on the vertical axis."""
    style = {"symbol": "x-thin", "line": {"width": 2, "color": entry.color}}
    return point(entry, run, x, 0.965, text, **style) | {"yaxis": "y2"}


def labels(x: Sequence[Any], y: Sequence[Any], texts: Sequence[str], **more: Any) -> Trace:
    """Return texts at points of a chart."""
    style = {"mode": "text", "textfont": {"size": 11}, "cliponaxis": False, "hoverinfo": "skip"}
    return trace(None, None, [*x], [*y], text=[*texts], **(style | more))


def thinned(series: Series, buckets: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return steps and values: each bucket keeps its lowest and highest value and its gaps."""
    values = series.values
    n = len(series)
    if n <= 2 * buckets:
        return series.steps.astype(np.int64), floats(values)
    chosen = {0, n - 1}
    finite = np.isfinite(values)
    low = np.where(finite, values, np.inf)
    high = np.where(finite, values, -np.inf)
    for start, end in pairwise(np.linspace(0, n, buckets + 1).astype(int)):
        bucket = slice(start, end)
        chosen |= {start + low[bucket].argmin(), start + high[bucket].argmax()}
        if not finite[bucket].all():
            chosen.add(start + finite[bucket].argmin())
    kept = np.asarray(sorted(chosen), dtype=np.intp)
    return series.steps[kept].astype(np.int64), floats(values[kept])


def smoothed(series: Series, buckets: int, log: bool) -> tuple[Floats, Floats, Floats]:
    """Return the middle steps of ranges, their means (geometric if ``log``), and these smoothed."""
    n = len(series)
    starts = np.linspace(0, n, min(n, buckets), endpoint=False).astype(np.intp)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.log(series.values) if log else series.values
        finite = np.isfinite(values)
        counts = np.add.reduceat(finite.astype(float), starts)
        means = np.add.reduceat(np.where(finite, values, 0.0), starts) / counts
    has_mean = np.isfinite(means)
    width = max(1, round(SMOOTHING * len(means)))
    middle = slice(width // 2, width // 2 + len(means))  # windows around the middle of each value
    sums = np.convolve(np.where(has_mean, means, 0.0), np.ones(width))[middle]
    near = np.convolve(has_mean, np.ones(width))[middle]
    rolled = np.where(has_mean, sums / np.maximum(near, 1), np.nan)
    steps = series.steps[(starts + np.append(starts[1:], n) - 1) // 2]
    return (steps, np.exp(means), np.exp(rolled)) if log else (steps, means, rolled)
