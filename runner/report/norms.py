"""Charts of gradient norms: what each threshold would clip, and each parameter's over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from runner.report import draw
from runner.report.draw import Chart, Trace
from runner.report.findings import Findings, Group
from runner.report.look import percent, rounded
from runner.report.run import Floats, Run, Series
from runner.run_folder import files, keys

_BINS = 60
# Rows for the labels of thresholds, and the width of one label as a part of the axis.
_LABELS, _WIDTH = 12, 0.3
# Most columns and rows of a map, and most maps.
_COLUMNS, _ROWS, _RUNS = 160, 64, 6


def norms(group: Group) -> Floats:
    """Return all finite ‖G‖ > 0 of a setting's runs, before clipping; see :attr:`Run.limited`."""
    found = np.concatenate([run.limited.finite for run in group.runs])
    return np.asarray(found[found > 0])


def scaled_note(groups: Iterable[Group]) -> str:
    """Return a sentence on :attr:`Run.limited` where some runs do not scale all gradients."""
    if not any(len(run.of(keys.GRAD_NORM_SCALED)) for group in groups for run in group.runs):
        return ""
    return (
        " Where Muon steps matrices, this is the norm of all other gradients, which the threshold "
        "limits; those of the matrices are not scaled (clip.scales=auto)."
    )


def threshold_charts(found: Findings) -> Iterator[Chart]:
    """Yield the histogram of the norms, and what runs recorded by ``clip.what_if``."""
    known = [group for group in found.groups if len(norms(group))]
    if known:
        # The setting that clipping changed least: without clipping, else fewest steps.
        yield _histogram(found, min(known, key=lambda g: (g.clips, found.ratio(g) or 0.0)))
    for facet in draw.facets(found.groups):
        recorded = [(g, run) for g in facet.own for run in g.runs if run.what_if]
        if not recorded:
            continue
        traces = []
        for group, run in recorded:
            x, y = [*run.what_if], [*run.what_if.values()]
            name = f"{group.label}, run {run.number}"
            traces.append(draw.line(group, x, y, name, run=run.number, mode="lines+markers"))
            ratio = found.measured[run.number][keys.CLIP_RATIO_TOTAL]
            if group.threshold is not None and ratio is not None:
                text = f"{name}: clipped {percent(ratio)} of its steps"
                traces.append(
                    draw.point(group, run.number, group.threshold, ratio, text, symbol="diamond")
                )
        ends = draw.limits([one["x"] for one in traces], True)
        note = "Lines: what a run recorded by clip.what_if. ◆ The share that it clipped itself."
        x_axis = draw.axis("threshold", ends, log=True, showgrid=False)
        y_axis = draw.axis("share of steps", (-0.03, 1.03), percent=True)
        title = f"Share of steps that other thresholds clip{facet.suffix}"
        yield draw.chart(f"what-if-{facet.mode}", title, note, traces, x_axis, y_axis)


def _histogram(found: Findings, reference: Group) -> Chart:
    values = np.sort(norms(reference))
    marked = {
        group.threshold: group
        for group in reversed(found.groups)
        if group.info.limits_norm and group.threshold is not None
    }
    ends = draw.limits([values, list(marked)], True)
    edges = np.geomspace(values[0] * 0.999, values[-1] * 1.001, _BINS + 1)
    shares = np.histogram(values, edges)[0] / len(values)
    top = float(shares.max())
    outline = draw.floats(np.repeat(edges, 2)), draw.floats([0, *np.repeat(shares, 2), 0])
    hover = "‖G‖ about %{x:.3~g}: %{y:.2~%} of steps<extra></extra>"
    style: Trace = {"fill": "tozeroy", "hoveron": "points", "hovertemplate": hover}
    traces = [draw.line(None, *outline, "steps", line={"width": 0.5}, **style)]
    # A label stands right of the end of its line. Where lines are close, the next one is shorter,
    # so that no line crosses a label.
    row, end, width = 0, -np.inf, np.log(ends[1] / ends[0])
    for threshold, group in sorted(marked.items()):
        below = float(np.searchsorted(values, threshold, side="right")) / len(values)
        text = f"{rounded(threshold)} · p{rounded(100 * below, 3)}"
        at = float(np.log(threshold / ends[0]) / width)
        row = 0 if at > end else row + 1
        height = top * max(1.38 - 0.09 * row, 0.1)
        mark = draw.line(group, [threshold] * 2, [0, height], text, line={"dash": "6px,4px"})
        traces.append(mark | {"hovertemplate": f"{text}<extra></extra>"})
        if row < _LABELS:
            end = max(end, at + _WIDTH)
            own: Trace = {key: mark[key] for key in ("legendgroup", "meta")}
            side = "middle right"
            traces.append(
                draw.labels([threshold], [height], [f" {text}"], textposition=side, **own)
            )
    note = f"All steps of “{reference.label}”, {len(values):,} norms. "
    if ratio := found.ratio(reference):
        note += f"No run went unclipped; this one was clipped least ({percent(ratio)} of steps). "
    if marked:
        note += "p90 at a threshold: 90 % of these norms lie at or below it."
    else:
        note += "No threshold here is a value of ‖G‖, so none is marked."
    title = "Norms without clipping" if not reference.clips else "Norms before clipping"
    return draw.chart(
        "histogram",
        title,
        note + scaled_note([reference]),
        traces,
        draw.axis("‖G‖ before clipping", ends, log=True, showgrid=False),
        draw.axis("share of steps", (0.0, top * 1.46), percent=True),
        margin=draw.FRAME | {"r": 64},
    )


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
    ends = draw.limits([logs for *_, logs in tables], False)
    maps = [
        _map(group, run, *table, ends)
        for (_, group, run), table in zip(recorded, tables, strict=False)
    ]
    left = len(recorded) - len(maps)
    note = f"{left} more runs recorded layers; their norms are in {files.ROWS}."
    return maps, note if left else None


def _map(
    group: Group, run: Run, names: list[str], steps: Floats, logs: Floats, ends: tuple[float, float]
) -> Chart:
    ticks = np.unique(np.linspace(*ends, 5).round(1))
    texts = [f"{10**tick:.2g}" for tick in ticks]
    heat = {
        "type": "heatmap",
        "x": draw.whole(steps),
        "y": names,
        "z": draw.floats(logs),
        "meta": {"group": group.index, "run": run.number},
        "zmin": ends[0],
        "zmax": ends[1],
        "colorscale": "Viridis",
        "colorbar": {"thickness": 10, "tickvals": ticks, "ticktext": texts},
        "hovertemplate": "%{y}, step %{x}: 10<sup>%{z:.2f}</sup><extra></extra>",
    }
    note = "Highest norm in each range of steps; one logarithmic scale for all runs. Empty where "
    note += "it was not finite or not recorded."
    left = len(run.layers) - len(names)
    note += f" The {left} parameters with the smallest norms are left out." if left else ""
    x = {"title": {"text": "optimizer step", "standoff": 8}, "tickformat": ",d", "showgrid": False}
    short = [name if len(name) <= 30 else f"…{name[-29:]}" for name in names]
    y: Trace = {"type": "category", "autorange": "reversed", "tickfont": {"size": 10}}
    y |= {"tickvals": names, "ticktext": short}
    size: Trace = {"height": max(240, 110 + 13 * len(names)), "margin": draw.FRAME | {"l": 190}}
    title = f"Norm by parameter · {group.label} · run {run.number}"
    return draw.chart(f"heat-{run.number}", title, note, [heat], x, y, **size)


def _table(rows: Mapping[str, Series]) -> tuple[list[str], Floats, Floats]:
    """Return names, the steps of each range, and log10 of the highest norm by row and range."""
    size = {key: np.median(one.finite) if len(one.finite) else 0.0 for key, one in rows.items()}
    largest = sorted(rows, key=size.__getitem__)[-_ROWS:]
    names = [key for key in rows if key in largest]
    steps = np.unique(np.concatenate([one.steps for one in rows.values()]))
    table = np.full((len(names), len(steps)), np.nan)
    for cells, one in zip(table, map(rows.__getitem__, names), strict=True):
        known = np.isfinite(one.values) & (one.values > 0)
        cells[np.searchsorted(steps, one.steps[known])] = one.values[known]
    starts = np.linspace(0, len(steps), min(_COLUMNS, len(steps)), endpoint=False).astype(int)
    return names, steps[starts], np.log10(np.fmax.reduceat(table, starts, axis=1))
