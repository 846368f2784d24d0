"""Charts of the metric that each threshold led to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from runner.report.findings import Findings
from runner.report.groups import CLIP, Facet, Group, choice, facets
from runner.report.notation import percent, rounded
from runner.report.palette import NEUTRAL, ordered
from runner.report.plotting import (
    FRAME,
    Chart,
    Trace,
    axis,
    chart,
    crosses,
    labels,
    limits,
    line,
    points,
    published,
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


def vertical(
    found: Findings, scores: Sequence[float]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the axis of the compared metric, and what the page needs to change its scale."""
    scales = {"linear": limits([scores], False)}
    if any(score > 0 for score in scores):
        scales["log"] = limits([scores], True)
    log = spans([scores], 30)
    y = axis(f"best {found.metric}", scales["log" if log else "linear"], log=log)
    return y, {"scales": scales}


def _metric_chart(
    found: Findings, facet: Facet, groups: Sequence[Group], every: Sequence[float]
) -> Chart:
    places, ends, ticks = _places(groups)
    x = axis(f"clip.threshold, clip={facet.mode}", ends, log=True, showgrid=False) | ticks
    y, meta = vertical(found, every)
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
    marks, note = published(facet.info.published, ends)
    told = "One point a run, a line through the means, a band over the seeds; "
    told += f"{'higher' if found.higher_is_better else 'lower'} is better. "
    told += "× diverged. " if lost else ""
    told += "Hollow: did not finish, and is in no mean. " if unfinished else ""
    told += "The charts of all modes have one vertical axis. " if facet.suffix else ""
    title = f"Best {found.metric} against threshold{facet.suffix}"
    more: Trace = {"meta": meta, "margin": FRAME | {"r": right}}
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
    columns = [key for key in found.differences.columns if key not in ("seed", *CLIP)]
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
