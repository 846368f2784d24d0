"""Draw a chart as static SVG, which needs no script and prints sharp.

Charts are drawn here and not by a library in the browser: nothing has to be downloaded or embedded,
a page of 16 runs stays near one megabyte, and paper shows what the screen shows. The script of the
page turns coordinates under the pointer back into values by the axes, which are attributes of each
chart (``data-x``, ``data-y``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from runner.report.markup import Child, Markup, join, short, tag
from runner.report.notation import rounded
from runner.report.scale import Axis
from runner.report.series import Floats
from runner.report.thin import kept

WIDTH, HEIGHT = 560, 310
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 16, 46
# A curve of at most so many points shows each as a dot.
_KNOTS = 30
# Size of the area inside the axes.
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


@dataclass(frozen=True)
class Curve:
    """Values of one run over steps.

    Attributes:
        group: index of the setting, which a reader can hide.
        name: name that is shown under the pointer.
        xs: steps, shape (n,).
        ys: values, shape (n,); the curve has a gap where they are not finite.
        color: colour of the stroke.
        dash: dashes of the stroke.
        kind: ``curve``, ``fine`` (thin, for many that overlap), or ``faint`` (behind another curve,
            and not shown under the pointer).
    """

    group: int
    name: str
    xs: Floats
    ys: Floats
    color: str
    dash: str = ""
    kind: str = "curve"


@dataclass(frozen=True)
class Level:
    """A threshold, marked across the whole chart."""

    group: int
    name: str
    y: float
    color: str


def line_chart(
    key: str,
    title: str,
    note: str,
    axes: tuple[Axis, Axis],
    curves: Sequence[Curve],
    levels: Sequence[Level] = (),
    buckets: int = 400,
) -> Markup:
    """Draw curves over steps, with an × at the first value of each that is not finite.

    Args:
        key: name of the chart in the page.
        title: heading of the chart.
        note: how to read the chart.
        axes: horizontal and vertical axis.
        curves: curves in drawing order.
        levels: thresholds to mark.
        buckets: resolution of the curves, see `runner.report.thin.kept`.
    """
    body: list[Child] = [_curve(curve, axes, buckets) for curve in curves]
    body += [_level(level, axes[1]) for level in levels]
    body += [_lost(curve, axes[0]) for curve in curves if curve.kind == "curve"]
    return framed(key, title, note, axes, join(body))


def framed(
    key: str,
    title: str,
    note: str,
    axes: tuple[Axis, Axis],
    body: Markup,
    *,
    around: Child = None,
    ticks: Sequence[tuple[float, str]] | None = None,
) -> Markup:
    """Return a chart: title, axes, ``body`` inside them, and a note below.

    Args:
        key: name of the chart in the page.
        title: heading of the chart.
        note: how to read the chart.
        axes: horizontal and vertical axis.
        body: drawing inside the axes, which clip it.
        around: drawing over the body, which may cross the axes.
        ticks: ticks of the horizontal axis in place of its own.
    """
    x, y = axes
    drawing = tag(
        "svg",
        tag("title", title),
        tag(
            "clipPath",
            tag("rect", x=LEFT, y=TOP, width=INNER_WIDTH, height=INNER_HEIGHT),
            id=f"inside-{key}",
        ),
        _grid(x, y, x.ticks() if ticks is None else ticks),
        tag("g", body, clip_path=f"url(#inside-{key})"),
        around,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=title,
        class_="chart",
        tabindex=0,
        data_chart=key,
        data_x=_terms(x),
        data_y=_terms(y),
        data_area=f"{LEFT} {TOP} {INNER_WIDTH} {INNER_HEIGHT}",
    )
    return tag(
        "figure",
        tag("h3", title),
        drawing,
        tag("p", class_="reading", aria_live="polite"),
        tag("figcaption", note),
    )


def across(axis: Axis, values: Floats | float) -> Floats:
    """Return the horizontal coordinates of values."""
    return LEFT + INNER_WIDTH * axis.place(values)


def upward(axis: Axis, values: Floats | float) -> Floats:
    """Return the vertical coordinates of values, which rise downwards in SVG."""
    return TOP + INNER_HEIGHT * (1 - axis.place(values))


def path(xs: Floats, ys: Floats) -> str:
    """Return the ``d`` of a line through points, interrupted where y is not finite."""
    parts: list[str] = []
    pen, point = "M", ""
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        if math.isfinite(y):
            # Some renderers overflow far outside the drawing.
            point = f"{x:.1f} {min(max(y, -9999.0), 9999.0):.1f}"
            parts.append(pen + point)
            pen = "L"
        elif pen == "L":
            parts.append(f"L{point}")
            pen = "M"
    # A line of no length is drawn as a dot, so that a value between two gaps is visible.
    return "".join(parts) + (f"L{point}" if pen == "L" else "")


def vertical(x: float, color: str, name: str, group: int) -> Markup:
    """Draw the level of a threshold as a vertical line at a horizontal coordinate."""
    return tag(
        "line",
        tag("title", name),
        x1=x,
        x2=x,
        y1=TOP,
        y2=TOP + INNER_HEIGHT,
        stroke=color,
        class_="level",
        data_group=group,
    )


def cross(x: float, y: float, color: str, name: str, group: int) -> Markup:
    """Draw a mark for a value that has no place on the axis."""
    return tag(
        "path",
        tag("title", name),
        d=f"M{short(x - 4)} {short(y - 4)}l8 8m0 -8l-8 8",
        stroke=color,
        class_="lost",
        data_group=group,
    )


def dot(x: float, y: float, color: str, name: str, group: int, whole: bool = True) -> Markup:
    """Draw a run as a point; hollow if it is not ``whole``."""
    return tag(
        "circle",
        tag("title", name),
        cx=x,
        cy=y,
        r=4.5,
        fill=color if whole else "#fff",
        stroke=None if whole else color,
        class_="point" if whole else "hollow",
        data_group=group,
        data_tip=name,
    )


def _curve(curve: Curve, axes: tuple[Axis, Axis], buckets: int) -> Markup:
    xs, ys = across(axes[0], curve.xs), upward(axes[1], curve.ys)
    at = kept(ys, buckets)
    line = tag(
        "path",
        d=path(xs[at], ys[at]),
        stroke=curve.color,
        stroke_dasharray=curve.dash or None,
        class_=curve.kind,
        data_group=curve.group,
        data_name=curve.name,
    )
    if curve.kind != "curve" or len(at) > _KNOTS:
        return line
    knots = [
        tag("circle", cx=x, cy=y, r=2.4, fill=curve.color, class_="knot", data_group=curve.group)
        for x, y in zip(xs.tolist(), ys.tolist(), strict=True)
        if math.isfinite(y)
    ]
    return join([line, *knots])


def _level(level: Level, axis: Axis) -> Markup:
    y = float(upward(axis, level.y))
    return tag(
        "line",
        tag("title", f"threshold of {level.name}: {rounded(level.y)}"),
        x1=LEFT,
        x2=LEFT + INNER_WIDTH,
        y1=y,
        y2=y,
        stroke=level.color,
        class_="level",
        data_group=level.group,
    )


def _lost(curve: Curve, axis: Axis) -> Markup | None:
    gone = np.flatnonzero(~np.isfinite(curve.ys))
    if not len(gone):
        return None
    first = int(gone[0])
    value, step = rounded(float(curve.ys[first])), rounded(float(curve.xs[first]), 9)
    name = f"{curve.name}: {value} at step {step}"
    if len(gone) > 1:
        name += f", and at {len(gone) - 1} more of the recorded steps"
    return cross(float(across(axis, curve.xs[first])), TOP + 7, curve.color, name, curve.group)


def _grid(x: Axis, y: Axis, ticks: Iterable[tuple[float, str]]) -> Markup:
    bottom, right = TOP + INNER_HEIGHT, LEFT + INNER_WIDTH
    parts: list[Markup] = []
    for value, text in y.ticks():
        at = float(upward(y, value))
        parts.append(tag("line", x1=LEFT, x2=right, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", text, x=LEFT - 7, y=at + 4, class_="tick", text_anchor="end"))
    for value, text in ticks:
        at = float(across(x, value))
        parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 5, class_="axis"))
        parts.append(tag("text", text, x=at, y=bottom + 18, class_="tick", text_anchor="middle"))
    parts.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    middle = LEFT + INNER_WIDTH / 2
    parts.append(tag("text", x.title, x=middle, y=HEIGHT - 8, class_="title", text_anchor="middle"))
    turn = f"translate(13 {TOP + INNER_HEIGHT / 2}) rotate(-90)"
    parts.append(tag("text", y.title, transform=turn, class_="title", text_anchor="middle"))
    return tag("g", *parts, aria_hidden="true")


def _terms(axis: Axis) -> str:
    kind = "log" if axis.log else "percent" if axis.percent else "linear"
    return f"{axis.low:.9g} {axis.high:.9g} {kind}"
