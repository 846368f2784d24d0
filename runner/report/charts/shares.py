"""Which parameters make most of ‖G‖, over the steps that were clipped, as a map."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from runner.report import figure
from runner.report.figure import Chart, Entry, Trace
from runner.report.run import Floats, Series

_COLUMNS = 80  # ranges of steps at most
_ROWS = 16


def draw(entry: Entry, run: str, shares: Mapping[str, Series]) -> Chart:
    """Draw the shares of a run's parameters, in the steps whose rows name them."""
    total = {name: float(series.values.sum()) for name, series in shares.items()}
    names = sorted(shares, key=total.__getitem__, reverse=True)[:_ROWS]
    steps = np.unique(np.concatenate([series.steps for series in shares.values()]))
    table = np.zeros((len(names), len(steps)))
    for cells, name in zip(table, names, strict=True):
        cells[np.searchsorted(steps, shares[name].steps)] = shares[name].values
    starts = np.linspace(0, len(steps), min(_COLUMNS, len(steps)), endpoint=False).astype(int)
    means = _means(table, starts)
    heat: Trace = {
        "type": "heatmap",
        "colorscale": "Viridis",
        "zmin": 0.0,
        "zmax": 1.0,
        "x": [f"{step:,.0f}" for step in steps[starts]],
        "y": names,
        "z": figure.floats(means),
        "meta": {"setting": entry.index, "run": run},
        "colorbar": {"thickness": 10, "tickformat": ".0%"},
        "hovertemplate": "%{y}, from step %{x}: %{z:.1%}<extra></extra>",
    }
    short = [name if len(name) <= 30 else f"…{name[-29:]}" for name in names]
    y: Trace = {"type": "category", "autorange": "reversed", "tickfont": {"size": 10}}
    y |= {"tickvals": names, "ticktext": short}
    x: Trace = {"type": "category", "title": {"text": "clipped steps", "standoff": 8}}
    x |= {"nticks": 6, "showgrid": False}
    note = f"Share of ‖G‖² in {len(steps):,} steps that were clipped or skipped, mean over ranges. "
    note += "A row names the largest shares alone."
    height = max(240, 120 + 16 * len(names))
    margin = figure.FRAME | {"l": 190}
    title = "Which parameters make the norm"
    return figure.chart("heat-top", title, note, [heat], x, y, height=height, margin=margin)


def _means(table: Floats, starts: NDArray[np.int64]) -> Floats:
    """Return the mean of the columns from each start to the next."""
    widths = np.diff(starts, append=table.shape[1])
    return np.asarray(np.add.reduceat(table, starts, axis=1) / widths)
