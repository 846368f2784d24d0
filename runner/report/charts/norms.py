"""The distribution of ‖G‖: what share of its steps each threshold would have clipped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runner.report import figure
from runner.report.figure import Chart, Entry, Trace
from runner.report.look import rounded
from runner.report.run import Floats

_BINS = 60
_LABELS = 5  # most labels of thresholds, which have room above the histogram


def draw(
    *,
    name: str,
    title: str,
    note: str,
    norms: Floats,
    thresholds: Sequence[tuple[Entry, float]],
) -> Chart:
    """Draw a histogram of ``norms``, and each threshold with its percentile."""
    values = np.sort(norms)
    marked = {threshold: entry for entry, threshold in reversed(thresholds)}
    ends = figure.limits([values, list(marked)], True)
    edges = np.geomspace(values[0] * 0.999, values[-1] * 1.001, _BINS + 1)
    shares = np.histogram(values, edges)[0] / len(values)
    top = float(shares.max())
    xs = figure.floats(np.repeat(edges, 2))
    ys = figure.floats([0, *np.repeat(shares, 2), 0])
    hover = "‖G‖ about %{x:.3~g}: %{y:.2~%} of steps<extra></extra>"
    style: Trace = {"fill": "tozeroy", "hoveron": "points", "hovertemplate": hover}
    traces = [figure.line(None, xs, ys, "steps", line={"width": 0.5}, **style)]
    # A label stands right of the end of its line, and the next line is shorter: none crosses it.
    thresholds_shown = sorted(marked)
    places = np.linspace(0, len(marked) - 1, min(len(marked), _LABELS)).round().astype(int)
    labelled = {thresholds_shown[place]: row for row, place in enumerate(places)}
    for threshold in thresholds_shown:
        entry = marked[threshold]
        below = float(np.searchsorted(values, threshold, side="right")) / len(values)
        text = f"{rounded(threshold)} · p{rounded(100 * below, 3)}"
        row = labelled.get(threshold)
        height = top * (0.95 if row is None else 1.4 - 0.09 * row)
        mark = figure.line(entry, [threshold] * 2, [0, height], text, line={"dash": "6px,4px"})
        traces.append(mark | {"hovertemplate": f"{text}<extra></extra>"})
        if row is not None:
            label: Trace = {"meta": mark["meta"], "textposition": "middle right"}
            traces.append(figure.labels([threshold], [height], [f" {text}"], **label))
    note += " p90 at a threshold: 90 % of these norms lie at or below it." if marked else ""
    return figure.chart(
        name,
        title,
        note,
        traces,
        figure.axis("‖G‖ before clipping", ends, log=True, showgrid=False),
        figure.axis("share of steps", (0.0, top * 1.46), percent=True),
        margin=figure.FRAME | {"r": 64},
    )
