"""The metric for two numbers that were swept: a map of means, with cells that diverged hatched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.report import figure
from runner.report.figure import Chart, Entry, Trace
from runner.report.look import INK, PAPER, rounded, viridis

_HATCHES = 7  # lines in a cell
_EDGE = 0.47  # distance of the edges of a hatched cell from its middle
_STOPS = np.linspace(0, 1, 17).tolist()  # places at which the scale of colours is given


class Cell(NamedTuple):
    """A setting: its two values, the mean (NaN if a seed diverged), and whether all are stable."""

    entry: Entry
    x: str
    y: str
    mean: float
    stable: bool
    text: str


def draw(
    *,
    name: str,
    title: str,
    note: str,
    axes: tuple[str, str],
    xs: Sequence[str],
    ys: Sequence[str],
    cells: Sequence[Cell],
    all_means: Sequence[float],
    limits_marked: bool,
    lower_is_better: bool,
    height: int = 330,
) -> Chart:
    """Draw a cell for each pair of values.

    Args:
        xs: values of the horizontal axis in rising order, and ``ys`` of the vertical one.
        all_means: means of all maps of the page, which share one scale of colours.
        limits_marked: whether the highest stable cell of each column has a mark.
    """
    means = np.full((len(ys), len(xs)), np.nan)
    texts: list[tuple[int, int, str]] = []
    hovers = [[""] * len(xs) for _ in ys]
    owners = [[-1] * len(xs) for _ in ys]
    shapes: list[dict[str, Any]] = []
    highest = dict.fromkeys(xs, -1)
    for cell in cells:
        column = xs.index(cell.x)
        row = ys.index(cell.y)
        means[row, column] = cell.mean
        owners[row][column] = cell.entry.index
        hovers[row][column] = cell.text
        if math.isfinite(cell.mean):
            texts.append((column, row, rounded(cell.mean, 3)))
        if not cell.stable:
            shapes.append(_hatch(column, row))
        else:
            highest[cell.x] = max(highest[cell.x], row)
    for column, x in enumerate(xs):
        if limits_marked and highest[x] >= 0:
            shapes.append(_limit(column, highest[x]))
    colours = _scaled(means, all_means)
    heat: Trace = {
        "type": "heatmap",
        "z": figure.floats(colours),
        "zmin": 0.0,
        "zmax": 1.0,
        "colorscale": [[place, _rgb(_color(place, lower_is_better))] for place in _STOPS],
        "showscale": False,
        "customdata": owners,
        "hovertext": hovers,
        "hoverinfo": "text",
        "xgap": 2,
        "ygap": 2,
        "meta": {"cells": True},
    }
    x_axis = _categories(axes[0], xs)
    y_axis = _categories(axes[1], ys)
    label_colors = []
    for column, row, _ in texts:
        label_colors.append(readable(_color(float(colours[row, column]), lower_is_better)))
    labels = figure.labels(
        [column for column, _, _ in texts],
        [row for _, row, _ in texts],
        [text for _, _, text in texts],
        textfont={"size": 12, "color": label_colors},
    )
    traces = [heat, labels]
    return figure.chart(name, title, note, traces, x_axis, y_axis, height=height, shapes=shapes)


def _scaled(means: NDArray[np.float64], all_means: Sequence[float]) -> NDArray[np.float64]:
    """Return means from 0, the lowest of all maps, to 1, the highest.

    Means that span decades are placed by their logarithms.
    """
    every = np.asarray(all_means)
    every = every[np.isfinite(every)]
    if not every.size:
        return means
    if every.min() > 0 and figure.spans([every], 5):
        every = np.log(every)
        means = np.log(means)
    width = float(np.ptp(every)) or 1.0
    return np.asarray((means - every.min()) / width, dtype=np.float64)


def _color(place: float, lower_is_better: bool) -> str:
    """Return the colour of a place on the scale: bright is good."""
    return viridis(1 - place if lower_is_better else place)


def _rgb(color: str) -> str:
    """Return a colour in a form that the page does not replace on a dark screen."""
    red, green, blue = bytes.fromhex(color[1:])
    return f"rgb({red},{green},{blue})"


def readable(color: str) -> str:
    """Return black or white, whichever has the higher contrast with a colour, 4.5:1 at least."""
    # The relative luminance of WCAG 2.2; both contrasts are equal at 0.179.
    channels = np.frombuffer(bytes.fromhex(color[1:]), np.uint8) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ (0.2126, 0.7152, 0.0722))
    return _rgb("#000000" if luminance > 0.179 else "#ffffff")


def _categories(title: str, values: Sequence[str]) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "tickvals": [*range(len(values))],
        "ticktext": [*values],
        "range": [-0.5, len(values) - 0.5],
        "showgrid": False,
        "zeroline": False,
    }


def _hatch(column: int, row: int) -> dict[str, Any]:
    """Return diagonal lines over a cell, and its edges."""
    left = column - _EDGE
    right = column + _EDGE
    low = row - _EDGE
    high = row + _EDGE
    path = f"M{left:.3f},{low:.3f}H{right:.3f}V{high:.3f}H{left:.3f}Z"
    steps = np.linspace(0, 2, _HATCHES + 2)[1:-1]
    for step in steps:
        start = (max(step - 1, 0.0), min(step, 1.0))
        end = (min(step, 1.0), max(step - 1, 0.0))
        for command, (x, y) in (("M", start), ("L", end)):
            path += f"{command}{left + 2 * _EDGE * x:.3f},{low + 2 * _EDGE * y:.3f}"
    return {"type": "path", "path": path, "line": {"color": INK, "width": 1.2}, "layer": "above"}


def _limit(column: int, row: int) -> dict[str, Any]:
    """Return a line above the highest stable cell of a column."""
    stroke = {"color": INK, "width": 4}
    ends = {"x0": column - 0.45, "x1": column + 0.45, "y0": row + 0.47, "y1": row + 0.47}
    return {"type": "line", "line": stroke, "layer": "above", **ends, "fillcolor": PAPER}
