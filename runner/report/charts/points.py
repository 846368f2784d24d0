"""The metric against a number that was swept: a point a run, and the mean of each setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from runner.report import figure
from runner.report.figure import Chart, Entry, Trace
from runner.report.look import NEUTRAL, rounded


class Point(NamedTuple):
    """The score of a run; NaN if it diverged. ``hollow``: the run is in no mean."""

    entry: Entry
    run: str
    place: float
    score: float
    text: str
    hollow: bool = False


class Mean(NamedTuple):
    """The mean of a setting, with the half width of its interval; None without several seeds."""

    entry: Entry
    place: float
    mean: float
    half: float | None
    text: str


class Level(NamedTuple):
    """A setting without a place on the axis, such as no clipping."""

    entry: Entry
    mean: float
    text: str


def draw(
    *,
    name: str,
    title: str,
    note: str,
    axes: tuple[str, str],
    points: Sequence[Point],
    means: Sequence[Mean],
    levels: Sequence[Level] = (),
    published: Sequence[tuple[float, str]] = (),
    names: Mapping[float, str] | None = None,
    reference: float | None = None,
    enclosed: Sequence[float] = (),
    height: int = 330,
) -> Chart:
    """Draw points, means with intervals, levels, and a line at the mean of the ``reference``.

    Args:
        names: the values of the axis as they were typed.
        enclosed: values of charts beside this one. The vertical axis encloses them too.
    """
    places = [point.place for point in points]
    ends = _ends(places)
    connected = [mean for mean in means if math.isfinite(mean.mean)]
    traces: list[Trace] = []
    if reference is not None:
        stroke = {"color": NEUTRAL, "width": 1, "dash": "2px,3px"}
        heights = [reference, reference]
        traces.append(figure.line(None, [*ends], heights, "", line=stroke, hoverinfo="skip"))
    for level in levels:
        traces += _level(level, ends)
    traces += _connection(connected)
    traces += [_mark(point) for point in points]
    traces += [_mean(mean) for mean in connected]
    of_others = [(place, who) for place, who in published if ends[0] < place < ends[1]]
    if of_others:
        note += " ▾ Published settings, of other models and losses."
        traces.append(_published(of_others))
    scores = [point.score for point in points]
    heights = [*scores, *enclosed, *(level.mean for level in levels)]
    for mean in connected:
        heights += interval(mean)
    scales, kind = figure.scales([heights], figure.spans([scores], 30))
    ticks = _ticks(sorted(set(places)), ends, names or {})
    return figure.chart(
        name,
        title,
        note,
        traces,
        figure.axis(axes[0], ends, log=True, showgrid=False) | ticks,
        figure.axis(axes[1], scales[kind], log=kind == "log"),
        meta={"scales": scales},
        height=height,
    )


def interval(mean: Mean) -> list[float]:
    """Return the ends of the interval of a mean."""
    half = mean.half or 0.0
    return [mean.mean - half, mean.mean + half]


def _ends(places: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the axis, with twice the usual margin."""
    low, high = figure.limits([places], True)
    margin = (high / low) ** 0.05
    return low / margin, high * margin


def _level(level: Level, ends: tuple[float, float]) -> list[Trace]:
    """Return a dashed line at the mean of a setting without a place, and its name."""
    stroke = {"width": 1.5, "dash": "8px,4px"}
    hover = {"hovertext": [level.text] * 2, "hoverinfo": "text"}
    heights = [level.mean] * 2
    line = figure.line(level.entry, [*ends], heights, "", line=stroke, **hover)
    style: Trace = {"textposition": "top left", "textfont": {"color": level.entry.color}}
    text = [f"{level.entry.label} "]
    return [line, figure.labels(ends[1:], [level.mean], text, **style)]


def _connection(means: Sequence[Mean]) -> list[Trace]:
    """Return a thin line through means, where each has a place of its own."""
    xs = [mean.place for mean in means]
    if not len(set(xs)) == len(xs) > 1:
        return []
    ys = [mean.mean for mean in means]
    return [figure.line(None, xs, ys, "", line={"width": 1}, hoverinfo="skip")]


def _published(of_others: Sequence[tuple[float, str]]) -> Trace:
    """Return marks at settings that others have published."""
    texts = {place: f"{rounded(place)}: {who}" for place, who in of_others}
    symbol: Trace = {"marker": {"symbol": "triangle-down", "size": 9, "color": NEUTRAL}}
    symbol |= {"hovertext": [*texts.values()], "hoverinfo": "text", "mode": "markers"}
    return figure.trace(None, None, [*texts], [1.0] * len(texts), yaxis="y2", **symbol)


def _mark(point: Point) -> Trace:
    if not math.isfinite(point.score):
        return figure.cross(point.entry, point.run, point.place, point.text)
    symbol = "circle-open" if point.hollow else "circle"
    style = {"symbol": symbol, "size": 7, "opacity": 0.65}
    return figure.point(point.entry, point.run, point.place, point.score, point.text, **style)


def _mean(mean: Mean) -> Trace:
    style = {"symbol": "line-ew", "size": 16, "line": {"width": 2.5, "color": mean.entry.color}}
    trace = figure.point(mean.entry, None, mean.place, mean.mean, mean.text, **style)
    if mean.half is not None:
        bars = {"type": "data", "array": [mean.half], "thickness": 1.2, "width": 5}
        trace["error_y"] = bars | {"color": mean.entry.color}
    return trace


def _ticks(places: Sequence[float], ends: tuple[float, float], names: Mapping[float, str]) -> Trace:
    """Return ticks at the values that were swept, as typed, without those that would overlap."""
    ticks: list[float] = []
    for place in places:
        if not ticks or place / ticks[-1] > (ends[1] / ends[0]) ** 0.055:
            ticks.append(place)
    if len(places) > 16:  # such as those that Optuna chose
        return {"dtick": 1} if ends[1] > 100 * ends[0] else {}
    return {"tickvals": ticks, "ticktext": [names.get(tick, rounded(tick)) for tick in ticks]}
