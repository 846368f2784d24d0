"""A chart as static SVG: it shows without scripts, prints sharp, and carries its own figures.

Charts are drawn here rather than by a library in the reader's browser: nothing has to be fetched or
carried along, a page of 16 runs stays near one megabyte, and paper shows what the screen shows. The
read-out under the pointer turns the drawn coordinates back into values; the axes are attributes of
each chart for that (``data-x``, ``data-y``).
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
# A curve of no more points than this shows each as a dot.
_KNOTS = 30
# The area inside the axes, in the coordinates of the drawing.
INNER_WIDTH, INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


@dataclass(frozen=True)
class Curve:
    """Values of one run over steps.

    Attributes:
        group: index of the setting, by which a reader dims and hides.
        name: what the read-out calls it.
        xs, ys: shape (n,); gaps where ``ys`` is not finite.
        color, dash: how it is stroked.
        kind: ``curve``, ``fine`` (thin, where many overlap), or ``faint`` (a background to another
            curve, and not read out).
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
    """A value marked across the whole chart: a threshold."""

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
    """Curves over steps, with an × at the top where one ceases to be a number.

    Args:
        key: name of the chart in the page.
        title: what it shows.
        note: how to read it, in a sentence.
        axes: horizontal, vertical.
        curves: in drawing order.
        levels: dashed lines.
        buckets: how finely curves are drawn, see `runner.report.thin.kept`.
    """
    body = [_curve(curve, axes, buckets) for curve in curves]
    body += [_level(level, axes[1]) for level in levels]
    body += [
        mark
        for curve in curves
        if curve.kind == "curve"
        for mark in [_lost(curve, axes[0])]
        if mark is not None
    ]
    return framed(key, title, note, axes, join(body))


def framed(
    key: str,
    title: str,
    note: str,
    axes: tuple[Axis, Axis],
    body: Markup,
    *,
    around: Child = None,
    read: bool = True,
    ticks: Sequence[tuple[float, str]] | None = None,
) -> Markup:
    """A figure: title, axes, ``body`` clipped to the area inside, and a note below.

    Args:
        key: name of the chart in the page.
        title: what it shows.
        note: how to read it.
        axes: horizontal, vertical.
        body: what is drawn inside the axes.
        around: what is drawn over it and may reach over the axes.
        read: whether the pointer and the arrow keys read values off.
        ticks: horizontal ticks other than the axis's own.
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
        tabindex=0 if read else None,
        data_chart=key,
        data_read=read,
        data_x=_terms(x),
        data_y=_terms(y),
        data_area=f"{LEFT} {TOP} {INNER_WIDTH} {INNER_HEIGHT}",
    )
    return tag(
        "figure",
        tag("h3", title),
        drawing,
        tag("p", class_="reading", aria_live="polite") if read else None,
        tag("figcaption", note),
    )


def across(axis: Axis, values: Floats | float) -> Floats:
    """Horizontal coordinates of values."""
    return LEFT + INNER_WIDTH * axis.place(values)


def upward(axis: Axis, values: Floats | float) -> Floats:
    """Vertical coordinates of values; an SVG counts downwards."""
    return TOP + INNER_HEIGHT * (1 - axis.place(values))


def path(xs: Floats, ys: Floats) -> str:
    """The ``d`` of a line through points in drawing coordinates, interrupted where y is NaN."""
    parts: list[str] = []
    pen, point = "M", ""
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        if math.isfinite(y):
            # Far outside nothing shows, and some renderers overflow.
            point = f"{x:.1f} {min(max(y, -9999.0), 9999.0):.1f}"
            parts.append(pen + point)
            pen = "L"
        elif pen == "L":
            parts.append(f"L{point}")
            pen = "M"
    # A line of no length shows as a dot, so that a value between two gaps is seen.
    return "".join(parts) + (f"L{point}" if pen == "L" else "")


def vertical(x: float, color: str, class_: str, name: str, group: int | None = None) -> Markup:
    """A line from bottom to top at a horizontal coordinate."""
    return tag(
        "line",
        tag("title", name),
        x1=x,
        x2=x,
        y1=TOP,
        y2=TOP + INNER_HEIGHT,
        stroke=color,
        class_=class_,
        data_group=group,
    )


def cross(x: float, y: float, color: str, name: str, group: int) -> Markup:
    """A mark for what has no place on the axis."""
    return tag(
        "path",
        tag("title", name),
        d=f"M{short(x - 4)} {short(y - 4)}l8 8m0 -8l-8 8",
        stroke=color,
        class_="lost",
        data_group=group,
    )


def dot(x: float, y: float, color: str, name: str, group: int, whole: bool = True) -> Markup:
    """A run as a point; hollow where it is not ``whole``."""
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
        name += f", and at {len(gone) - 1} more of the steps recorded"
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
