"""What all charts have in common: frame, axes, traces, and curves with fewer points.

A curve of 10,000 steps that is 500 pixels wide shows the range of about 20 steps in each column of
pixels. Buckets that keep their lowest and highest value draw the same range with two points each; a
mean, or every n-th point, would lose the single steps at which a norm spikes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from runner.config.modes import ModeInfo
from runner.report.findings import Group, clipping_modes
from runner.report.look import INK, NEUTRAL, PAPER, RULE
from runner.report.run import Floats

Trace = dict[str, Any]

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
FRAME = {"l": 60, "r": 16, "t": 40, "b": 40}
"""Margins of a chart in pixels."""

_EDGE = 0.965  # height of marks that have no place on the vertical axis


@dataclass(frozen=True)
class Chart:
    """One chart of the page."""

    key: str
    title: str
    note: str
    figure: go.Figure


@dataclass(frozen=True)
class Facet:
    """Settings that one chart compares."""

    mode: str
    groups: tuple[Group, ...]
    suffix: str

    @property
    def own(self) -> list[Group]:
        """Settings of the mode itself."""
        return [group for group in self.groups if group.mode == self.mode]

    @property
    def info(self) -> ModeInfo:
        """Facts about the mode."""
        return next((group.info for group in self.own), ModeInfo())


def facets(groups: Sequence[Group]) -> list[Facet]:
    """Return the settings by mode, because thresholds of two modes do not compare."""
    modes = clipping_modes(groups) or ["none"]
    compared = {m: tuple(g for g in groups if g.mode == m or not g.clips) for m in modes}
    return [Facet(m, of, f" · clip={m}" if len(modes) > 1 else "") for m, of in compared.items()]


def chart(
    key: str,
    title: str,
    note: str,
    traces: Sequence[Trace],
    x: dict[str, Any],
    y: dict[str, Any],
    *,
    meta: dict[str, Any] | None = None,
    **layout: Any,
) -> Chart:
    """Return a chart of ``traces``."""
    figure = go.Figure(
        list(traces),
        {
            "template": go.layout.Template(),
            "title": {"text": title},
            "meta": meta or {},
            "font": {"family": FONT, "size": 12, "color": INK},
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
            "margin": FRAME,
            "height": 330,
            "hoverlabel": {
                "bgcolor": PAPER,
                "bordercolor": NEUTRAL,
                "font": {"color": INK, "size": 11},
            },
            "legend": {"tracegroupgap": 0},
            "hoversort": "value descending",
            "hovermode": "closest",
            "xaxis": x,
            "yaxis": y,
            "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
            **layout,
        },
    )
    return Chart(key, title, note, figure)


def axis(
    title: str, ends: tuple[float, float], *, log: bool = False, percent: bool = False, **more: Any
) -> dict[str, Any]:
    """Return an axis of plotly from ``ends[0]`` to ``ends[1]``, both above 0 if ``log``."""
    return {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "type": "log" if log else "linear",
        "range": list(map(math.log10, ends)) if log else list(ends),
        "tickformat": ".3~%" if percent else ".6~g",
        "gridcolor": RULE,
        "linecolor": NEUTRAL,
        "zeroline": False,
        "nticks": 4 if log and ends[1] < 1e3 * ends[0] else 7,
        **more,
    }


def limits(values: Iterable[ArrayLike], log: bool) -> tuple[float, float]:
    """Return ends that enclose all finite values, or the positive ones if ``log``, with a
    margin.
    """
    low, high = math.inf, -math.inf
    for one in values:
        array = np.asarray(one, dtype=np.float64)
        shown = array[np.isfinite(array) & ((array > 0) | (not log))]
        if shown.size:
            low, high = min(low, float(shown.min())), max(high, float(shown.max()))
    if low > high:
        return (0.1, 10.0) if log else (0.0, 1.0)
    if log:
        span = max(high / low, 1.5) ** 0.05
        return low / span, high * span
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def spans(values: Sequence[ArrayLike], factor: float) -> bool:
    """Return whether all finite values are positive and most of them span more than ``factor``."""
    arrays = [np.asarray(one, dtype=np.float64).ravel() for one in values]
    every = np.concatenate(arrays) if arrays else np.empty(0)
    every = every[np.isfinite(every)]
    if not every.size or every.min() <= 0:
        return False
    low, high = np.percentile(every, (2, 98))
    return bool(high / low > factor)


def floats(values: ArrayLike) -> NDArray[np.float32]:
    """Return values as they travel in the page: 4 bytes each, NaN where not finite."""
    array = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.abs(array) < 3e38, array, np.nan).astype(np.float32)


def whole(steps: Floats) -> NDArray[Any]:
    """Return steps as they travel in the page: 4 bytes each unless they need more."""
    return steps.astype(np.int32) if not len(steps) or steps[-1] < 2**31 else steps


def line(group: Group | None, x: ArrayLike, y: ArrayLike, name: str, **more: Any) -> Trace:
    """Return a curve in the colour of a setting, which disappears with the setting."""
    stroke = {"color": group.color if group else NEUTRAL, "width": 1.7} | more.pop("line", {})
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "name": name,
        "line": stroke,
        "showlegend": False,
        # With a template, plotly would show what is to be skipped.
        **({} if "hoverinfo" in more else {"hovertemplate": "%{y:.4~g}"}),
        **_of(group, more.pop("run", None)),
        **more,
    }


def points(group: Group, x: ArrayLike, y: ArrayLike, texts: Sequence[str], **more: Any) -> Trace:
    """Return points of a setting, each with the text under the pointer."""
    style = {"color": group.color, "size": 9, "line": {"width": 1, "color": PAPER}}
    style |= more.pop("marker", {})
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "name": group.label,
        "marker": style,
        "showlegend": False,
        "hovertext": list(texts),
        "hoverinfo": "text",
        **_of(group, more.pop("run", None)),
        **more,
    }


def crosses(group: Group, x: ArrayLike, texts: Sequence[str], **more: Any) -> Trace:
    """Return marks at the upper edge for values that have no place on the vertical axis."""
    style = {"symbol": "x-thin", "line": {"width": 2, "color": group.color}}
    y = [_EDGE] * len(texts)
    return points(group, x, y, texts, yaxis="y2", marker=style, **more)


def labels(x: Sequence[Any], y: Sequence[Any], texts: Sequence[str], **more: Any) -> Trace:
    """Return texts inside a chart."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": list(x),
        "y": list(y),
        "text": list(texts),
        "textfont": {"size": 11},
        "cliponaxis": False,
        "hoverinfo": "skip",
        "showlegend": False,
        **more,
    }


def _of(group: Group | None, run: str | None) -> Trace:
    """Return what tells the page which setting and which run a trace shows."""
    if group is None:
        return {}
    return {"legendgroup": str(group.index), "meta": {"group": group.index, "run": run}}


def kept(values: Floats, buckets: int) -> NDArray[np.intp]:
    """Return the indices of the points to draw."""
    n = len(values)
    if n <= 2 * buckets:
        return np.arange(n)
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    chosen = {0, n - 1}
    for start, end in pairwise(np.linspace(0, n, buckets + 1).astype(int)):
        at = slice(start, end)
        chosen |= {start + low[at].argmin(), start + high[at].argmax()}
        if not finite[at].all():
            chosen.add(start + finite[at].argmin())
    return np.asarray(sorted(chosen), dtype=np.intp)


def means(
    steps: Floats, values: Floats, buckets: int, log: bool = False
) -> tuple[Floats, Floats, Floats]:
    """Return the middle step, the mean and the highest value of each of at most ``buckets``
    ranges.
    """
    n = len(values)
    starts = np.linspace(0, n, min(n, buckets), endpoint=False).astype(np.intp)
    with np.errstate(invalid="ignore", divide="ignore"):
        of = np.log(values) if log else values
        finite = np.isfinite(of)
        counts = np.add.reduceat(finite.astype(float), starts)
        mean = np.add.reduceat(np.where(finite, of, 0.0), starts) / counts
        highest = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    middle = (starts + np.append(starts[1:], n) - 1) // 2
    return steps[middle], np.exp(mean) if log else mean, highest


def rolling_mean(values: Floats, width: int, log: bool = False) -> Floats:
    """Return the mean of the finite values among the ``width`` around each; NaN at gaps."""
    if width <= 1 or not len(values):
        return values
    with np.errstate(invalid="ignore", divide="ignore"):
        of = np.log(values) if log else values
    finite = np.isfinite(of)
    held = slice(width // 2, width // 2 + len(values))  # windows around the middle of each value
    sums = np.convolve(np.where(finite, of, 0.0), np.ones(width))[held]
    counts = np.convolve(finite, np.ones(width))[held]
    # A value that is not finite stays a gap in the curve.
    mean = np.where(finite, sums / np.maximum(counts, 1), np.nan)
    return np.exp(mean) if log else mean
