"""Charts of the metric that thresholds led to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from runner.report import draw
from runner.report.advice import THRESHOLD
from runner.report.draw import Chart, Facet, Trace
from runner.report.findings import CLIP, Findings, Group, choice
from runner.report.look import NEUTRAL, ordered, percent, rounded
from runner.run_folder import keys

# Most lines of settings that differ in more than their threshold.
_LINES = 12


def metric_charts(found: Findings) -> Iterator[Chart]:
    """Yield a chart of the metric against the threshold for each mode, with one vertical axis."""
    scores = {run.number: found.score(run) for run in found.sweep.runs}
    judged = (run.number for group in found.groups for run in found.judged(group))
    every = [score for number in judged if (score := scores[number]) is not None]
    for facet in draw.facets(found.groups):
        groups = [g for g in facet.groups if any(scores[run.number] is not None for run in g.runs)]
        if len(groups) > 1 and any(group.threshold is not None for group in groups):
            yield _metric_chart(found, facet, groups, every)


def _metric_chart(
    found: Findings, facet: Facet, groups: Sequence[Group], every: Sequence[float]
) -> Chart:
    places, ends, ticks = _places(groups)
    traces = list(_lines(found, groups, places))
    right = 16 + 6 * max((len(text) for one in traces for text in one.get("text", ())), default=0)
    note = (
        "One point a run (× diverged; hollow: did not finish, and is in no mean), a line through "
    )
    note += "the means, a band over the seeds; "
    note += f"{'higher' if found.higher_is_better else 'lower'} is better. "
    for group, run in ((of, run) for of in groups for run in of.runs):
        score, at = found.score(run), places[group.index]
        ratio = percent(found.measured[run.number][keys.CLIP_RATIO_TOTAL])
        text = f"{group.label}, run {run.number}: best {found.metric} {rounded(score)}, {ratio} of "
        text += f"steps clipped{'' if found.counts(run) else f' ({run.state})'}"
        if score is not None and math.isfinite(score):
            symbol = "circle" if found.counts(run) else "circle-open"
            traces.append(draw.point(group, run.number, at, score, text, symbol=symbol))
        elif score is not None:
            traces.append(draw.cross(group, run.number, at, text))
    marks = {x: f"{rounded(x)} {who}" for x, who in facet.info.published if ends[0] < x < ends[1]}
    if marks:
        note += f"▾ Published settings, of other models and losses: {'; '.join(marks.values())}. "
        style: Trace = {"symbol": "triangle-down", "size": 9, "color": NEUTRAL}
        about: Trace = {"hovertext": [*marks.values()], "hoverinfo": "text", "name": "published"}
        about |= {"mode": "markers", "marker": style, "yaxis": "y2", "cliponaxis": False}
        traces.append(draw.trace(None, None, [*marks], [1.0] * len(marks), **about))
    scales, kind = draw.scales([every], draw.spans([every], 30))
    return draw.chart(
        f"metric-{facet.mode}",
        f"Best {found.metric} against threshold{facet.suffix}",
        note,
        traces,
        draw.axis(f"{THRESHOLD}, clip={facet.mode}", ends, log=True, showgrid=False) | ticks,
        draw.axis(f"best {found.metric}", scales[kind], log=kind == "log"),
        meta={"scales": scales},
        margin=draw.FRAME | {"r": right},
    )


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
    texts = [*map(rounded, ticks), *(["none"] if unclipped else [])]
    places = {g.index: none if g.threshold is None else g.threshold for g in groups}
    return places, ends, {"tickvals": [*ticks, none][: len(texts)], "ticktext": texts}


def _lines(
    found: Findings, groups: Sequence[Group], places: Mapping[int, float]
) -> Iterator[Trace]:
    """Yield bands over seeds and lines through means, each named by what it differs in."""
    columns = [key for key in found.columns if key not in ("seed", *CLIP)]
    lines: dict[tuple[str, ...], list[tuple[float, float, float, float]]] = {}
    for group in groups:
        if group in found.ranked:
            scores = found.seeds(group).values()
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
            yield draw.line(None, *around, name, line={"width": 0}, opacity=0.15, **area)
        yield draw.line(None, xs, ys, name, line={"color": color, "width": 1.3}, hoverinfo="skip")
        if name and len(lines) <= _LINES:
            font = {"size": 11, "color": color}
            text = [f"  {name}"]
            yield draw.labels(xs[-1:], ys[-1:], text, textposition="middle right", textfont=font)
