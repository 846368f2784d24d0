"""Charts of thresholds: the metric that they led to, the norms that they limit, what they clip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from runner.report import draw
from runner.report.draw import Chart, Facet, Trace
from runner.report.findings import CLIP, Findings, Group, choice
from runner.report.look import NEUTRAL, ordered, percent, rounded
from runner.report.run import Floats
from runner.report.verdict import THRESHOLD
from runner.run_folder import keys

_BINS = 60
_LABELS = 12  # most labels of thresholds
_LINES = 12  # most lines of settings that differ in more than their threshold


def metric_charts(found: Findings) -> Iterator[Chart]:
    """Yield a chart of the metric against the threshold for each mode, with one vertical axis."""
    runs = [run for group in found.groups for run in found.judged(group)]
    every = [score for run in runs if (score := found.score(run)) is not None]
    for facet in draw.facets(found.groups):
        groups = [g for g in facet.groups if any(found.score(run) is not None for run in g.runs)]
        if len(groups) > 1 and any(group.threshold is not None for group in groups):
            yield _metric_chart(found, facet, groups, every)


def _metric_chart(
    found: Findings, facet: Facet, groups: Sequence[Group], every: Sequence[float]
) -> Chart:
    places, ends, ticks = _places(groups)
    traces = list(_lines(found, groups, places))
    right = 16 + 6 * max((len(text) for one in traces for text in one.get("text", ())), default=0)
    note = "One point a run (× diverged; hollow: did not finish, and is in no mean), a line through"
    note += f" the means, a band over the seeds; {'higher' if found.higher_is_better else 'lower'}"
    note += " is better. "
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
        style: Trace = {"marker": {"symbol": "triangle-down", "size": 9, "color": NEUTRAL}}
        style |= {"hovertext": [*marks.values()], "hoverinfo": "text", "mode": "markers"}
        traces.append(draw.trace(None, None, [*marks], [1.0] * len(marks), yaxis="y2", **style))
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


def norms(group: Group) -> Floats:
    """Return all finite ‖G‖ > 0 of a setting's runs, before clipping; see :attr:`Run.limited`."""
    found = np.concatenate([run.limited.finite for run in group.runs])
    return np.asarray(found[found > 0])


def scaled_note(groups: Iterable[Group]) -> str:
    """Return a sentence on :attr:`Run.limited` where some runs do not scale all gradients."""
    some = any(len(run.of(keys.GRAD_NORM_SCALED)) for group in groups for run in group.runs)
    note = " Where Muon steps matrices, this is the norm of all other gradients, which λ limits."
    return note if some else ""


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
                text, at = f"{name}: clipped {percent(ratio)} of its steps", group.threshold
                traces.append(draw.point(group, run.number, at, ratio, text, symbol="diamond"))
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
    # A label stands right of the end of its line, and the next line is shorter: none crosses it.
    for row, (threshold, group) in enumerate(sorted(marked.items())):
        below = float(np.searchsorted(values, threshold, side="right")) / len(values)
        text = f"{rounded(threshold)} · p{rounded(100 * below, 3)}"
        height = top * max(1.38 - 0.09 * row, 0.1)
        mark = draw.line(group, [threshold] * 2, [0, height], text, line={"dash": "6px,4px"})
        traces.append(mark | {"hovertemplate": f"{text}<extra></extra>"})
        if row < _LABELS:
            own: Trace = {key: mark[key] for key in ("legendgroup", "meta")}
            own["textposition"] = "middle right"
            traces.append(draw.labels([threshold], [height], [f" {text}"], **own))
    note = f"All steps of “{reference.label}”, {len(values):,} norms. "
    if ratio := found.ratio(reference):
        note += f"No run went unclipped; this one was clipped least ({percent(ratio)} of steps). "
    note += "p90 at a threshold: 90 % of these norms lie at or below it." if marked else ""
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
