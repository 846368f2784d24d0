"""Charts of gradient norms: what each threshold would clip, and each parameter's over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from runner.config.modes import info_of
from runner.report.findings import Findings, Group, norms, scaled_note
from runner.report.look import NEUTRAL, percent, rounded
from runner.report.plotting import (
    FRAME,
    Chart,
    Facet,
    Trace,
    axis,
    chart,
    facets,
    floats,
    labels,
    limits,
    line,
    points,
    whole,
)
from runner.report.run import Floats, Run, Series
from runner.run_folder import files

_BINS = 60
# Rows for the labels of thresholds, and the width of one label as a part of the axis.
_ROWS, _LABEL = 12, 0.3
# Points of the drawn curve; the prediction uses every norm.
_POINTS = 240


def threshold_charts(found: Findings) -> Iterator[Chart]:
    """Yield the histogram of the norms, and for each mode the clip ratio against the threshold."""
    if (reference := found.reference()) is not None:
        yield _histogram(found, reference)
    for facet in facets(found.groups):
        if any(g.threshold is not None and found.ratio(g) is not None for g in facet.own):
            yield _ratios(found, facet)


def _histogram(found: Findings, reference: Group) -> Chart:
    """Return a histogram of the norms of the least clipped setting."""
    values = np.sort(norms(reference))
    marked = {
        group.threshold: group
        for group in reversed(found.groups)
        if group.info.limits_norm and group.threshold is not None
    }
    ends = limits([values, list(marked)], True)
    edges = np.geomspace(values[0] * 0.999, values[-1] * 1.001, _BINS + 1)
    shares = np.histogram(values, edges)[0] / len(values)
    top = float(shares.max())
    bars = {
        **line(None, floats(np.repeat(edges, 2)), floats([0, *np.repeat(shares, 2), 0]), "steps"),
        "fill": "tozeroy",
        "line": {"width": 0.5, "color": NEUTRAL},
        "hoveron": "points",
        "hovertemplate": "‖G‖ about %{x:.3~g}: %{y:.2~%} of steps<extra></extra>",
    }
    traces = [bars]
    # A label stands right of the end of its line. Where lines are close, the next one is shorter,
    # so that no line crosses a label.
    row, end, width = 0, -np.inf, np.log(ends[1] / ends[0])
    for threshold, group in sorted(marked.items()):
        below = float(np.searchsorted(values, threshold, side="right")) / len(values)
        text = f"{rounded(threshold)} · p{rounded(100 * below, 3)}"
        at = float(np.log(threshold / ends[0]) / width)
        row = 0 if at > end else row + 1
        height = top * max(1.38 - 0.09 * row, 0.1)
        mark = line(group, [threshold] * 2, [0, height], text, line={"dash": "6px,4px"})
        traces.append(mark | {"hovertemplate": f"{text}<extra></extra>"})
        if row < _ROWS:
            end = max(end, at + _LABEL)
            own = {key: mark[key] for key in ("legendgroup", "meta")}
            side = {"textposition": "middle right"}
            traces.append(labels([threshold], [height], [f" {text}"], **side, **own))
    note = f"All steps of “{reference.label}”, {len(values):,} norms. "
    if ratio := found.ratio(reference):
        note += f"No run went unclipped; this one was clipped least ({percent(ratio)} of steps). "
    if marked:
        note += "p90 at a threshold: 90 % of these norms lie at or below it."
    else:
        note += "No threshold here is a value of ‖G‖, so none is marked."
    note += scaled_note([reference])
    title = "Norms without clipping" if not reference.clips else "Norms before clipping"
    x = axis("‖G‖ before clipping", ends, log=True, showgrid=False)
    y_axis = axis("share of steps", (0.0, top * 1.46), percent=True)
    return chart("histogram", title, note, traces, x, y_axis, margin=FRAME | {"r": 64})


@dataclass(frozen=True)
class Prediction:
    """Shares of steps that thresholds would have clipped."""

    thresholds: Floats
    shares: Floats
    source: str

    def at(self, threshold: float) -> float | None:
        """Return the share at a threshold, interpolated on a log axis; None if none is known."""
        if not len(self.thresholds):
            return None
        return float(np.interp(math.log(threshold), np.log(self.thresholds), self.shares))


def predict(found: Findings, mode: str) -> Prediction:
    """Predict from the runs which share of steps each threshold of a mode clips."""
    reference = found.reference()
    info = next((group.info for group in found.groups if group.mode == mode), info_of(mode))
    if info.limits_norm and reference is not None:
        measured = np.sort(norms(reference))
        tried = [g.threshold for g in found.groups if g.mode == mode and g.threshold is not None]
        some = np.linspace(0, len(measured) - 1, min(len(measured), _POINTS)).astype(int)
        at = np.unique(np.concatenate((measured[some], tried)))
        above = 1 - np.searchsorted(measured, at, side="right") / len(measured)
        source = f"Line: share of the steps of “{reference.label}” whose ‖G‖ lies above."
        return Prediction(at, above, source)
    recorded = [
        (found.ratio(group) or 0.0, run.number, shares)
        for group in found.groups
        for run in group.runs
        if group.mode == mode and (shares := run.what_if)
    ]
    # The run that clipping changed least.
    _, number, shares = min(recorded, key=lambda entry: entry[:2], default=(0.0, "", {}))
    if recorded:
        source = f"Line: what run {number} recorded by clip.what_if."
    elif info.follows == "norms":
        source = "This mode derives its limit from the norms so far, so no share is predicted."
    else:
        source = "No run of this mode recorded clip.what_if, so none is predicted."
    return Prediction(np.array(list(shares)), np.array(list(shares.values())), source)


def _ratios(found: Findings, facet: Facet) -> Chart:
    predicted = predict(found, facet.mode)
    groups = [(group, group.threshold) for group in facet.own if group.threshold is not None]
    ends = limits([[threshold for _, threshold in groups], predicted.thresholds], True)
    x, y = floats(predicted.thresholds), floats(predicted.shares)
    traces = [line(None, x, y, "predicted", hovertemplate="%{x:.4~g}: %{y:.2~%} of steps")]
    for group, threshold in groups:
        expected = predicted.at(threshold)
        for run in group.runs:
            ratio = found.measured[run.number].ratio
            if ratio is None or not math.isfinite(ratio):
                continue
            name = f"{group.label}, run {run.number}: clipped {percent(ratio)} of its steps"
            name += "" if expected is None else f"; predicted {percent(expected)}"
            traces.append(points(group, [threshold], [ratio], [name], run=run.number))
    note = f"{predicted.source} Points: observed by runs. A point off the line means that clipping "
    note += "changed the norms themselves."
    title = f"Predicted against observed clip ratio{facet.suffix}"
    x_axis = axis("threshold", ends, log=True, showgrid=False)
    y_axis = axis("share of steps clipped", (-0.03, 1.03), percent=True)
    return chart(f"predicted-{facet.mode}", title, note, traces, x_axis, y_axis)


# Most columns and rows of a map, and most maps.
_COLUMNS, _ROWS, _RUNS = 160, 64, 6


def heat_maps(found: Findings) -> tuple[list[Chart], str | None]:
    """Return maps of the first runs that recorded layers, and a note on the others."""
    recorded = [
        (position, group, run)
        for group in found.groups
        for position, run in enumerate(group.runs)
        if run.layers
    ]
    # The first seed of each setting comes before the second of any.
    recorded.sort(key=lambda entry: (entry[0], entry[1].index))
    tables = [_table(run.layers) for *_, run in recorded[:_RUNS]]
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
    left = len(run.layers) - len(names)
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
    for cells, name in zip(table, names, strict=True):
        one = rows[name]
        at = ((one.steps - first) / max(last - first, 1) * (columns - 1e-6)).astype(int)
        known = np.isfinite(one.values)
        np.fmax.at(cells, np.clip(at, 0, columns - 1)[known], one.values[known])
    steps = np.linspace(first, last, columns).round()
    with np.errstate(divide="ignore", invalid="ignore"):
        return names, steps, np.log10(np.where(table > 0, table, np.nan))
