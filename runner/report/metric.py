"""Charts of the metric that thresholds and learning rates led to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

import numpy as np

from runner.report.advice import RATE, THRESHOLD, value_of
from runner.report.findings import CLIP, Findings, Group, choice, natural
from runner.report.look import NEUTRAL, ordered, percent, rounded
from runner.report.plotting import (
    FRAME,
    Chart,
    Facet,
    Trace,
    axis,
    chart,
    crosses,
    facets,
    floats,
    labels,
    limits,
    line,
    points,
    spans,
)

# Most lines of settings that differ in more than their threshold.
_LINES = 12


def metric_charts(found: Findings) -> Iterator[Chart]:
    """Yield a chart of the metric against the threshold for each mode, all with one vertical
    axis.
    """
    runs = [run for group in found.groups for run in found.judged(group)]
    every = [score for run in runs if (score := found.score(run)) is not None]
    for facet in facets(found.groups):
        compared = [g for g in facet.groups if any(found.score(run) is not None for run in g.runs)]
        if len(compared) > 1 and any(group.threshold is not None for group in compared):
            yield _metric_chart(found, facet, compared, every)


def _metric_chart(
    found: Findings, facet: Facet, groups: Sequence[Group], every: Sequence[float]
) -> Chart:
    places, ends, ticks = _places(groups)
    x = axis(f"clip.threshold, clip={facet.mode}", ends, log=True, showgrid=False) | ticks
    scales = {"linear": limits([every], False)}
    if any(score > 0 for score in every):
        scales["log"] = limits([every], True)
    log = spans([every], 30)
    y = axis(f"best {found.metric}", scales["log" if log else "linear"], log=log)
    traces = list(_lines(found, groups, places))
    right = 16 + 6 * max((len(text) for one in traces for text in one.get("text", ())), default=0)
    unfinished = lost = False
    for group, run in ((of, run) for of in groups for run in of.runs):
        score, at = found.score(run), [places[group.index]]
        if score is None:
            continue
        text = f"{group.label}, run {run.number}: best {found.metric} {rounded(score)}"
        text += f", {percent(found.measured[run.number].ratio)} of steps clipped"
        if not math.isfinite(score):
            lost = True
            traces.append(crosses(group, at, [text], run=run.number))
            continue
        counts = found.counts(run)
        unfinished |= not counts
        style = {"symbol": "circle" if counts else "circle-open"}
        text += "" if counts else f" ({run.state})"
        traces.append(points(group, at, [score], [text], marker=style, run=run.number))
    marks, note = _published(facet.info.published, ends)
    told = "One point a run, a line through the means, a band over the seeds; "
    told += f"{'higher' if found.higher_is_better else 'lower'} is better. "
    told += "× diverged. " if lost else ""
    told += "Hollow: did not finish, and is in no mean. " if unfinished else ""
    told += "The charts of all modes have one vertical axis. " if facet.suffix else ""
    title = f"Best {found.metric} against threshold{facet.suffix}"
    more: Trace = {"meta": {"scales": scales}, "margin": FRAME | {"r": right}}
    return chart(f"metric-{facet.mode}", title, told + note, [*traces, marks], x, y, **more)


def _places(
    groups: Sequence[Group],
) -> tuple[dict[int, float], tuple[float, float], dict[str, object]]:
    """Return the threshold of each setting by its index, the ends of the axis, and its ticks."""
    known = sorted({group.threshold for group in groups if group.threshold})
    span = max(known[-1] / known[0], 2.0)
    none = known[-1] * span**0.18
    unclipped = any(group.threshold is None for group in groups)
    ends = (known[0] / span**0.08, (none if unclipped else known[-1]) * span**0.08)
    ticks: list[float] = []
    for value in known:
        if not ticks or value / ticks[-1] > span**0.055:
            ticks.append(value)
    texts = [rounded(value) for value in ticks]
    if unclipped:
        ticks, texts = [*ticks, none], [*texts, "none"]
    places = {g.index: none if g.threshold is None else g.threshold for g in groups}
    return places, ends, {"tickvals": ticks, "ticktext": texts}


def _lines(
    found: Findings, groups: Sequence[Group], places: Mapping[int, float]
) -> Iterator[Trace]:
    """Yield bands over seeds and lines through means, each named by what it differs in."""
    columns = [key for key in found.columns if key not in ("seed", *CLIP)]
    lines: dict[tuple[str, ...], list[tuple[float, float, float, float]]] = {}
    for group in groups:
        if group in found.ranked:
            scores = found.scores(group)
            point = (places[group.index], found.mean(group)[0], min(scores), max(scores))
            lines.setdefault(tuple(choice(group.runs[0], key) for key in columns), []).append(point)
    several = {key for i, key in enumerate(columns) if len({of[i] for of in lines}) > 1}
    colors = ordered(len(lines)) if 1 < len(lines) <= _LINES else [NEUTRAL] * len(lines)
    for color, (values, of) in zip(colors, lines.items(), strict=True):
        pairs = zip(columns, values, strict=True)
        name = ", ".join(f"{k.rpartition('.')[2]}={v}" for k, v in pairs if k in several)
        xs, ys, low, high = np.asarray(sorted(of)).T
        if (high > low).any():
            around = [*xs, *xs[::-1]], [*high, *low[::-1]]
            area: Trace = {"fill": "toself", "fillcolor": color, "hoverinfo": "skip"}
            yield line(None, *around, name, line={"width": 0}, opacity=0.15, **area)
        yield line(None, xs, ys, name, line={"color": color, "width": 1.3}, hoverinfo="skip")
        if name and len(lines) <= _LINES:
            font = {"size": 11, "color": color}
            text = [f"  {name}"]
            yield labels(xs[-1:], ys[-1:], text, textposition="middle right", textfont=font)


def _published(marks: Iterable[tuple[float, str]], ends: tuple[float, float]) -> tuple[Trace, str]:
    """Return triangles at published thresholds inside ``ends``, and a sentence that lists them."""
    inside = [(value, who) for value, who in marks if ends[0] < value < ends[1]]
    told = "; ".join(f"{rounded(value)} {who}" for value, who in inside)
    trace = {
        **labels([value for value, _ in inside], [1.0] * len(inside), []),
        "mode": "markers",
        "yaxis": "y2",
        "name": "published",
        "marker": {"symbol": "triangle-down", "size": 9, "color": NEUTRAL},
        "hovertext": [f"{rounded(value)}: {who}" for value, who in inside],
        "hoverinfo": "text",
    }
    note = f"▾ Published settings, of other models and losses: {told}. " if told else ""
    return trace, note


def rate_charts(found: Findings) -> Iterator[Chart]:
    """Yield a map of the metric for each mode that ran with several rates and thresholds."""
    for facet in facets(found.groups):
        cells: dict[tuple[float, str], list[float]] = {}
        for group in facet.groups:
            if (rate := value_of(group, RATE)) and found.scores(group):
                cell = cells.setdefault((rate, choice(group.runs[0], THRESHOLD)), [])
                cell.append(found.mean(group)[0])
        rates = sorted({rate for rate, _ in cells})
        thresholds = sorted({threshold for _, threshold in cells}, key=natural)
        if len(rates) > 1 and len(thresholds) > 1:
            yield _map(found, facet, cells, rates, thresholds)


def _map(
    found: Findings,
    facet: Facet,
    cells: Mapping[tuple[float, str], Sequence[float]],
    rates: Sequence[float],
    thresholds: Sequence[str],
) -> Chart:
    """Return the mean metric of each learning rate and threshold; NaN where a run diverged."""
    means = {cell: fmean(values) for cell, values in cells.items()}
    texts = {
        cell: rounded(value) if math.isfinite(value) else "diverged"
        for cell, value in means.items()
    }
    heat = {
        "type": "heatmap",
        "x": thresholds,
        "y": [rounded(rate, 6) for rate in rates],
        "z": floats([[means.get((rate, t), math.nan) for t in thresholds] for rate in rates]),
        "text": [[texts.get((rate, t), "") for t in thresholds] for rate in rates],
        "texttemplate": "%{text}",
        # Black text is read well on all of it, and on the background of what diverged.
        "colorscale": "Tealgrn_r" if found.higher_is_better else "Tealgrn",
        "textfont": {"color": "#000"},
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": "threshold %{x}, learning rate %{y}: %{text}<extra></extra>",
        "colorbar": {"title": {"text": found.metric, "side": "right"}, "thickness": 12},
    }
    edges = []
    for i, threshold in enumerate(thresholds):
        stable = [
            j for j, r in enumerate(rates) if math.isfinite(means.get((r, threshold), math.nan))
        ]
        for j in stable[-1:]:
            box = {"x0": i - 0.49, "x1": i + 0.49, "y0": j - 0.49, "y1": j + 0.49}
            edges.append({"type": "rect", "line": {"width": 3, "color": "#e8590c"}} | box)
    mixed = any(len(values) > 1 for values in cells.values())
    note = f"Mean best {found.metric} of the seeds"
    note += f"{' and of settings that differ in other keys' * mixed}. Orange: the highest learning "
    note += "rate of the sweep at which no seed diverged, for each threshold."
    kind = {"type": "category", "showgrid": False}
    x = kind | {"title": {"text": f"{THRESHOLD}, clip={facet.mode}"}}
    y = kind | {"title": {"text": RATE}}
    more: Trace = {"shapes": edges, "plot_bgcolor": "#dde2e8"}
    return chart(
        f"map-{facet.mode}",
        f"Learning rate and threshold{facet.suffix}",
        note,
        [heat],
        x,
        y,
        **more,
    )
