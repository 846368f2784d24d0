"""The gradient norm of each parameter over steps, as a map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from runner.report import figure
from runner.report.figure import Chart, Entry, Trace
from runner.report.run import Floats, Series

_COLUMNS = 160  # of a map at most
_ROWS = 64


class Layers(NamedTuple):
    """The norms of a run's parameters."""

    entry: Entry
    run: str
    series: Mapping[str, Series]


class Table(NamedTuple):
    """Names of rows, the first step of each column, and log10 of the highest norm in each cell."""

    names: list[str]
    steps: Floats
    logs: Floats


def draw(runs: Sequence[Layers]) -> list[Chart]:
    """Draw a map a run, with one scale of colours for all."""
    tables = [_table(run.series) for run in runs]
    ends = figure.limits([table.logs for table in tables], False)
    return [_map(run, table, ends) for run, table in zip(runs, tables, strict=True)]


def _map(run: Layers, table: Table, ends: tuple[float, float]) -> Chart:
    ticks = np.unique(np.linspace(*ends, 5).round(1))
    heat: Trace = {
        "type": "heatmap",
        "colorscale": "Viridis",
        "zmin": ends[0],
        "zmax": ends[1],
        "x": table.steps.astype(np.int64),
        "y": table.names,
        "z": figure.floats(table.logs),
        "meta": {"setting": run.entry.index, "run": run.run},
        "colorbar": {
            "thickness": 10,
            "tickvals": ticks,
            "ticktext": [f"{10**tick:.2g}" for tick in ticks],
        },
        "hovertemplate": "%{y}, step %{x}: 10<sup>%{z:.2f}</sup><extra></extra>",
    }
    note = "Highest norm in each range of steps; one logarithmic scale for all runs."
    hidden = len(run.series) - len(table.names)
    note += f" The {hidden} parameters with the smallest norms are left out." if hidden else ""
    x = {"title": {"text": "step", "standoff": 8}, "tickformat": ",d", "showgrid": False}
    short = [name if len(name) <= 30 else f"…{name[-29:]}" for name in table.names]
    y: Trace = {"type": "category", "autorange": "reversed", "tickfont": {"size": 10}}
    y |= {"tickvals": table.names, "ticktext": short}
    height = max(240, 110 + 13 * len(table.names))
    margin = figure.FRAME | {"l": 190}
    title = f"Norm by parameter · {run.entry.label} · run {run.run}"
    return figure.chart(f"heat-{run.run}", title, note, [heat], x, y, height=height, margin=margin)


def _table(rows: Mapping[str, Series]) -> Table:
    """Return the norms of the parameters with the largest ones, in ranges of steps."""
    median = {}
    for key, series in rows.items():
        median[key] = np.median(series.finite) if len(series.finite) else 0.0
    largest = sorted(rows, key=median.__getitem__)[-_ROWS:]
    names = [key for key in rows if key in largest]
    steps = np.unique(np.concatenate([series.steps for series in rows.values()]))
    table = np.full((len(names), len(steps)), np.nan)
    for cells, name in zip(table, names, strict=True):
        series = rows[name]
        positive = np.isfinite(series.values) & (series.values > 0)
        cells[np.searchsorted(steps, series.steps[positive])] = series.values[positive]
    starts = np.linspace(0, len(steps), min(_COLUMNS, len(steps)), endpoint=False).astype(int)
    return Table(names, steps[starts], np.log10(np.fmax.reduceat(table, starts, axis=1)))
