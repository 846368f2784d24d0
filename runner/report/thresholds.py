"""Charts of thresholds: the metric that they led to, the norms that they limit, what they clip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from runner.report import draw
from runner.report.draw import Chart, Facet, Trace
from runner.report.findings import CLIP, Findings, Group, choice
from runner.report.look import NEUTRAL, ordered, percent, rounded
from runner.report.run import Floats, Run
from runner.report.verdict import THRESHOLD
from runner.run_folder import keys

_BINS = 60
_LABELS = 12  # most labels of thresholds
_LINES = 12  # most lines of settings that differ in more than their threshold


def metric_charts(findings: Findings) -> Iterator[Chart]:
    """Yield a chart of the metric against the threshold for each mode, with one vertical axis."""
    runs = [run for group in findings.groups for run in findings.judged(group)]
    all_scores = [findings.score(run) for run in runs]
    scores = [score for score in all_scores if score is not None]
    for facet in draw.facets(findings.groups):
        groups = [g for g in facet.groups if any(findings.score(run) is not None for run in g.runs)]
        if len(groups) > 1 and any(group.threshold is not None for group in groups):
            yield _metric_chart(findings, facet, groups, scores)


def _metric_chart(
    findings: Findings, facet: Facet, groups: Sequence[Group], scores: Sequence[float]
) -> Chart:
    places, ends, ticks = _places(groups)
    traces = list(_lines(findings, groups, places))
    lengths = [len(text) for trace in traces for text in trace.get("text", ())]
    right = 16 + 6 * max(lengths, default=0)
    better = "higher" if findings.higher_is_better else "lower"
    note = "One point a run (× diverged; hollow: did not finish, and is in no mean), a line through"
    note += f" the means, a band over the seeds; {better} is better. "
    for group in groups:
        for run in group.runs:
            traces += _points(findings, group, run, places[group.index])
    marks = {x: f"{rounded(x)} {who}" for x, who in facet.info.published if ends[0] < x < ends[1]}
    if marks:
        note += f"▾ Published settings, of other models and losses: {'; '.join(marks.values())}. "
        style: Trace = {"marker": {"symbol": "triangle-down", "size": 9, "color": NEUTRAL}}
        style |= {"hovertext": [*marks.values()], "hoverinfo": "text", "mode": "markers"}
        traces.append(draw.trace(None, None, [*marks], [1.0] * len(marks), yaxis="y2", **style))
    scales, kind = draw.scales([scores], draw.spans([scores], 30))
    return draw.chart(
        f"metric-{facet.mode}",
        f"Best {findings.metric} against threshold{facet.suffix}",
        note,
        traces,
        draw.axis(f"{THRESHOLD}, clip={facet.mode}", ends, log=True, showgrid=False) | ticks,
        draw.axis(f"best {findings.metric}", scales[kind], log=kind == "log"),
        meta={"scales": scales},
        margin=draw.FRAME | {"r": right},
    )


def _points(findings: Findings, group: Group, run: Run, place: float) -> Iterator[Trace]:
    """Yield the point of a run, or a cross if its score is not finite."""
    score = findings.score(run)
    if score is None:
        return
    counts = findings.counts(run)
    ratio = percent(findings.measured[run.number][keys.CLIP_RATIO_TOTAL])
    text = f"{group.label}, run {run.number}: best {findings.metric} {rounded(score)}, {ratio} of "
    text += f"steps clipped{'' if counts else f' ({run.state})'}"
    if math.isfinite(score):
        symbol = "circle" if counts else "circle-open"
        yield draw.point(group, run.number, place, score, text, symbol=symbol)
    else:
        yield draw.cross(group, run.number, place, text)


def _places(
    groups: Sequence[Group],
) -> tuple[dict[int, float], tuple[float, float], dict[str, object]]:
    """Return the threshold of each setting by its index, the ends of the axis, and its ticks."""
    thresholds = sorted({group.threshold for group in groups if group.threshold})
    lowest = thresholds[0]
    highest = thresholds[-1]
    span = max(highest / lowest, 2.0)
    none = highest * span**0.18
    unclipped = any(group.threshold is None for group in groups)
    ends = (lowest / span**0.08, (none if unclipped else highest) * span**0.08)
    ticks: list[float] = []
    for threshold in thresholds:
        if not ticks or threshold / ticks[-1] > span**0.055:
            ticks.append(threshold)
    texts = [rounded(tick) for tick in ticks]
    if unclipped:
        ticks.append(none)
        texts.append("none")
    places = {g.index: none if g.threshold is None else g.threshold for g in groups}
    return places, ends, {"tickvals": ticks, "ticktext": texts}


def _lines(
    findings: Findings, groups: Sequence[Group], places: Mapping[int, float]
) -> Iterator[Trace]:
    """Yield bands over seeds and lines through means, each named by what it differs in."""
    columns = [key for key in findings.columns if key not in ("seed", *CLIP)]
    lines: dict[tuple[str, ...], list[tuple[float, float, float, float]]] = {}
    for group in groups:
        if group in findings.ranked:
            scores = findings.seeds(group).values()
            point = (places[group.index], findings.mean(group)[0], min(scores), max(scores))
            lines.setdefault(tuple(choice(group.runs[0], key) for key in columns), []).append(point)
    colors = ordered(len(lines)) if 1 < len(lines) <= _LINES else [NEUTRAL] * len(lines)
    names = _names_of_lines(columns, list(lines))
    for color, name, points in zip(colors, names, lines.values(), strict=True):
        xs, ys, low, high = np.asarray(sorted(points)).T
        if (high > low).any():
            around_xs = [*xs, *xs[::-1]]
            around_ys = [*high, *low[::-1]]
            area: Trace = {"fill": "toself", "fillcolor": color, "hoverinfo": "skip"}
            area |= {"line": {"width": 0}, "opacity": 0.15}
            yield draw.line(None, around_xs, around_ys, name, **area)
        yield draw.line(None, xs, ys, name, line={"color": color, "width": 1.3}, hoverinfo="skip")
        if name and len(lines) <= _LINES:
            font = {"size": 11, "color": color}
            text = [f"  {name}"]
            yield draw.labels(xs[-1:], ys[-1:], text, textposition="middle right", textfont=font)


def _names_of_lines(columns: Sequence[str], choices: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a name for each line: the columns in which the lines differ, with their values."""
    differing = [i for i in range(len(columns)) if len({values[i] for values in choices}) > 1]
    shorts = [key.rpartition(".")[2] for key in columns]
    return [", ".join(f"{shorts[i]}={values[i]}" for i in differing) for values in choices]


def norms(group: Group) -> Floats:
    """Return all finite ‖G‖ > 0 of a setting's runs, before clipping; see :attr:`Run.limited`."""
    finite = np.concatenate([run.limited.finite for run in group.runs])
    return np.asarray(finite[finite > 0])


def scaled_note(groups: Iterable[Group]) -> str:
    """Return a sentence on :attr:`Run.limited` where some runs do not scale all gradients."""
    note = " Where Muon steps matrices, this is the norm of all other gradients, which λ limits."
    runs = [run for group in groups for run in group.runs]
    return note if any(len(run.of(keys.GRAD_NORM_SCALED)) for run in runs) else ""


def threshold_charts(findings: Findings) -> Iterator[Chart]:
    """Yield the histogram of the norms, and what runs recorded by ``clip.what_if``."""
    measured = [group for group in findings.groups if len(norms(group))]
    if measured:
        # The setting that clipping changed least: without clipping, else fewest steps.
        yield _histogram(findings, min(measured, key=lambda g: (g.clips, findings.ratio(g) or 0.0)))
    for facet in draw.facets(findings.groups):
        recorded = [(g, run) for g in facet.clipping for run in g.runs if run.what_if]
        if not recorded:
            continue
        traces = []
        for group, run in recorded:
            thresholds = [*run.what_if]
            shares = [*run.what_if.values()]
            name = f"{group.label}, run {run.number}"
            style: Trace = {"run": run.number, "mode": "lines+markers"}
            traces.append(draw.line(group, thresholds, shares, name, **style))
            ratio = findings.measured[run.number][keys.CLIP_RATIO_TOTAL]
            if group.threshold is not None and ratio is not None:
                text = f"{name}: clipped {percent(ratio)} of its steps"
                place = group.threshold
                traces.append(draw.point(group, run.number, place, ratio, text, symbol="diamond"))
        ends = draw.limits([trace["x"] for trace in traces], True)
        note = "Lines: what a run recorded by clip.what_if. ◆ The share that it clipped itself."
        x_axis = draw.axis("threshold", ends, log=True, showgrid=False)
        y_axis = draw.axis("share of steps", (-0.03, 1.03), percent=True)
        title = f"Share of steps that other thresholds clip{facet.suffix}"
        yield draw.chart(f"what-if-{facet.mode}", title, note, traces, x_axis, y_axis)


def _histogram(findings: Findings, reference: Group) -> Chart:
    values = np.sort(norms(reference))
    marked = {
        group.threshold: group
        for group in reversed(findings.groups)
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
            label: Trace = {key: mark[key] for key in ("legendgroup", "meta")}
            label["textposition"] = "middle right"
            traces.append(draw.labels([threshold], [height], [f" {text}"], **label))
    note = f"All steps of “{reference.label}”, {len(values):,} norms. "
    ratio = findings.ratio(reference)
    if ratio:
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
