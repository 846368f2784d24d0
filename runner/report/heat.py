"""Maps of the gradient norm of each parameter over time, one for each run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from runner.report.findings import Findings
from runner.report.groups import Group
from runner.report.plotting import FRAME, Chart, Trace, chart, floats, whole
from runner.report.run import Run
from runner.report.series import Floats, Series, layers
from runner.run_folder import files

# Most columns and rows of a map, and most maps.
_COLUMNS, _ROWS, _RUNS = 160, 64, 6


def heat_maps(found: Findings) -> tuple[list[Chart], str | None]:
    """Return maps of the first runs that recorded layers, and a note on the others."""
    recorded = [
        (position, group, run)
        for group in found.groups
        for position, run in enumerate(group.runs)
        if layers(run.series)
    ]
    # The first seed of each setting comes before the second of any.
    recorded.sort(key=lambda entry: (entry[0], entry[1].index))
    tables = [_table(layers(run.series)) for *_, run in recorded[:_RUNS]]
    every = np.concatenate([np.empty(0), *(logs[np.isfinite(logs)] for *_, logs in tables)])
    ends = (float(every.min()), float(every.max())) if len(every) else (0.0, 1.0)
    drawn = zip(recorded, tables, strict=False)
    maps = [_map(group, run, *of, ends) for (_, group, run), of in drawn]
    left = len(recorded) - len(maps)
    note = f"{left} more runs recorded layers; their norms are in {files.ROWS}."
    return maps, note if left else None


def _map(
    group: Group, run: Run, names: list[str], steps: Floats, logs: Floats, ends: tuple[float, float]
) -> Chart:
    ticks = np.unique(np.linspace(*ends, 5).round(1))
    trace = {
        "type": "heatmap",
        "x": whole(steps),
        "y": names,
        "z": floats(logs),
        "meta": {"group": group.index, "run": run.number},
        "zmin": ends[0],
        "zmax": ends[1],
        "colorscale": "Viridis",
        "colorbar": {
            "thickness": 10,
            "tickvals": ticks,
            "ticktext": [f"{10**tick:.2g}" for tick in ticks],
        },
        "hovertemplate": "%{y}, step %{x}: 10<sup>%{z:.2f}</sup><extra></extra>",
    }
    note = "Highest norm in each range of steps; one logarithmic scale for all runs. Empty where "
    note += "it was not finite or not recorded."
    left = len(layers(run.series)) - len(names)
    note += f" The {left} parameters with the smallest norms are left out." if left else ""
    title = f"Norm by parameter · {group.label} · run {run.number}"
    x = {"title": {"text": "optimizer step", "standoff": 8}, "tickformat": ",d", "showgrid": False}
    y: Trace = {
        "type": "category",
        "autorange": "reversed",
        "tickfont": {"size": 10},
        "tickvals": names,
    }
    y["ticktext"] = [name if len(name) <= 30 else f"…{name[-29:]}" for name in names]
    size: Trace = {"height": max(240, 110 + 13 * len(names)), "margin": FRAME | {"l": 190}}
    return chart(f"heat-{run.number}", title, note, [trace], x, y, **size)


def _table(rows: Mapping[str, Series]) -> tuple[list[str], Floats, Floats]:
    """Return names, the steps of each range, and log10 of the highest norm by row and range."""
    last = max(float(one.steps[-1]) for one in rows.values())
    first = min(float(one.steps[0]) for one in rows.values())
    size = {key: -np.median(one.finite) if len(one.finite) else 0.0 for key, one in rows.items()}
    largest = sorted(rows, key=size.__getitem__)[:_ROWS]
    names = [key for key in rows if key in largest]
    columns = min(_COLUMNS, max(map(len, rows.values())))
    table = np.full((len(names), columns), np.nan)
    for line, one in zip(table, (rows[name] for name in names), strict=True):
        at = ((one.steps - first) / max(last - first, 1) * (columns - 1e-6)).astype(int)
        known = np.isfinite(one.values)
        np.fmax.at(line, np.clip(at, 0, columns - 1)[known], one.values[known])
    steps = np.linspace(first, last, columns).round()
    with np.errstate(divide="ignore", invalid="ignore"):
        return names, steps, np.log10(np.where(table > 0, table, np.nan))
