"""Settings as rows, sorted: the difference of each to the reference, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from runner.report import figure
from runner.report.figure import Chart, Entry, Trace
from runner.report.look import NEUTRAL

_ROW = 21  # pixels
_LABEL = 34  # most characters of a name


class Row(NamedTuple):
    """A setting; ``difference`` is NaN without a mean, ``seeds`` are the paired differences."""

    entry: Entry
    difference: float
    half: float | None
    seeds: Sequence[tuple[str, float]]
    text: str
    diverged: bool = False


def draw(*, name: str, title: str, note: str, axis: str, rows: Sequence[Row]) -> Chart:
    """Draw ``rows`` from top to bottom."""
    traces: list[Trace] = []
    values: list[float] = [0.0]
    for number, row in enumerate(rows):
        for run, difference in row.seeds:
            style = {"size": 6, "opacity": 0.5}
            traces.append(figure.point(row.entry, run, difference, number, row.text, **style))
            values.append(difference)
        half = row.half or 0.0
        values += [row.difference - half, row.difference + half]
    ends = figure.limits([values], False)
    for number, row in enumerate(rows):
        if row.diverged:
            symbol: Trace = {"symbol": "x-thin", "line": {"width": 2, "color": row.entry.color}}
            at_edge = ends[1] - 0.02 * (ends[1] - ends[0])
            traces.append(figure.point(row.entry, None, at_edge, number, row.text, **symbol))
        if not math.isfinite(row.difference):
            continue
        trace = figure.point(row.entry, None, row.difference, number, row.text, size=10)
        if row.half is not None:
            bars = {"type": "data", "array": [row.half], "thickness": 1.5, "width": 4}
            trace["error_x"] = bars | {"color": row.entry.color}
        traces.append(trace)
    zero = {"color": NEUTRAL, "width": 1, "dash": "2px,3px"}
    height = [-0.6, len(rows) - 0.4]
    traces.insert(0, figure.line(None, [0, 0], height, "", line=zero, hoverinfo="skip"))
    names = [row.entry.label for row in rows]
    shortened = [text if len(text) <= _LABEL else f"{text[: _LABEL - 1]}…" for text in names]
    y = {
        "tickvals": [*range(len(rows))],
        "ticktext": shortened,
        "range": [len(rows) - 0.4, -0.6],
        "automargin": True,
        "showgrid": False,
        "zeroline": False,
    }
    x = figure.axis(axis, ends)
    size = max(180, 70 + _ROW * len(rows))
    return figure.chart(name, title, note, traces, x, y, height=size)
