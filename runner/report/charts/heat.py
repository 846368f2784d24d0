"""The metric for two numbers that were swept: a map of means, with cells that diverged hatched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from runner.report import figure
from runner.report.figure import Chart, Entry, Trace
from runner.report.look import INK, PAPER, rounded

_HATCHES = 5  # lines in a cell


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
    lower_is_better: bool,
    height: int = 330,
) -> Chart:
    """Draw a cell for each pair of values, ``xs`` and ``ys`` in rising order."""
    means = np.full((len(ys), len(xs)), np.nan)
    texts = [[""] * len(xs) for _ in ys]
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
            texts[row][column] = rounded(cell.mean, 3)
        if not cell.stable:
            shapes.append(_hatch(column, row))
        else:
            highest[cell.x] = max(highest[cell.x], row)
    for column, x in enumerate(xs):
        if highest[x] >= 0:
            shapes.append(_limit(column, highest[x]))
    positive = means[means > 0]
    wide = len(positive) == np.isfinite(means).sum() and figure.spans([positive], 5)
    colours = np.log(means) if wide else means
    heat: Trace = {
        "type": "heatmap",
        "z": figure.floats(colours),
        "colorscale": "Viridis",
        "reversescale": lower_is_better,
        "showscale": False,
        "text": texts,
        "texttemplate": "%{text}",
        "customdata": owners,
        "hovertext": hovers,
        "hoverinfo": "text",
        "xgap": 2,
        "ygap": 2,
        "meta": {"cells": True},
    }
    x_axis = _categories(axes[0], xs)
    y_axis = _categories(axes[1], ys)
    return figure.chart(name, title, note, [heat], x_axis, y_axis, height=height, shapes=shapes)


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
    """Return diagonal lines over a cell."""
    steps = np.linspace(0, 2, _HATCHES + 2)[1:-1]
    path = ""
    for step in steps:
        start = (max(step - 1, 0.0), min(step, 1.0))
        end = (min(step, 1.0), max(step - 1, 0.0))
        for command, (x, y) in (("M", start), ("L", end)):
            path += f"{command}{column - 0.46 + 0.92 * x:.3f},{row - 0.46 + 0.92 * y:.3f}"
    return {"type": "path", "path": path, "line": {"color": INK, "width": 1.2}, "layer": "above"}


def _limit(column: int, row: int) -> dict[str, Any]:
    """Return a line above the highest stable cell of a column."""
    stroke = {"color": INK, "width": 4}
    ends = {"x0": column - 0.45, "x1": column + 0.45, "y0": row + 0.47, "y1": row + 0.47}
    return {"type": "line", "line": stroke, "layer": "above", **ends, "fillcolor": PAPER}
