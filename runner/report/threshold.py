"""Charts of the metric that each threshold led to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from runner.report.chart import INNER_WIDTH, TOP, across, cross, dot, framed, path, upward
from runner.report.findings import Findings
from runner.report.groups import Facet, Group, choice, facets
from runner.report.markup import Markup, join, tag
from runner.report.notation import percent, rounded
from runner.report.run import Run
from runner.report.scale import Axis, covering

# Smallest distance in pixels between two labels under an axis.
_APART = 36

Scored = tuple[Group, Run, float]


def metric_charts(found: Findings) -> list[Markup]:
    """Return a chart of the metric against the threshold for each mode, one point a run."""
    charts = []
    for facet in facets(found.groups):
        scored = [
            (group, run, score)
            for group in facet.groups
            for run in group.runs
            if (score := found.score(run)) is not None
        ]
        clipped = any(group.threshold is not None for group in facet.groups)
        if clipped and len({group.index for group, *_ in scored}) > 1:
            charts.append(_metric_chart(found, facet, scored))
    return charts


def _metric_chart(found: Findings, facet: Facet, scored: Sequence[Scored]) -> Markup:
    groups = list({group.index: group for group, *_ in scored}.values())
    axis, ticks, places = _threshold_axis(groups, facet.mode)
    scores = np.asarray([score for *_, score in scored])
    finite = scores[np.isfinite(scores) & (scores > 0)]
    log = bool(len(finite) and finite.max() / finite.min() > 30 and not np.any(scores <= 0))
    vertical = covering([scores], log=log, title=f"best {found.metric}")
    body = [_means(found, groups, places, vertical)]
    for group, run, score in scored:
        x = places[group.index]
        name = f"{group.label}, run {run.number}: best {found.metric} {rounded(score)}"
        name += f", {percent(found.measured[run.number].ratio)} of steps clipped"
        if math.isfinite(score):
            whole = found.counts(run)
            name += "" if whole else f" ({run.state})"
            y = float(upward(vertical, score))
            body.append(dot(x, y, group.color, name, group.index, whole))
        else:
            body.append(cross(x, TOP + 8, group.color, name, group.index))
    better = "higher is better" if found.higher_is_better else "lower is better"
    note = f"One point a run, a line through the means; {better}. "
    note += "× diverged. " if not np.isfinite(scores).all() else ""
    if any(not found.counts(run) for group in groups for run in group.runs):
        note += "Hollow: did not finish, and is in no mean. "
    # Published thresholds are of other losses, optimizers and batches: orders of magnitude.
    published = [mark for mark in facet.info.published if axis.low < mark[0] < axis.high]
    marks = "; ".join(f"{rounded(value)} {who}" for value, who in published)
    return framed(
        f"metric-{facet.mode}",
        f"Best {found.metric} against threshold{facet.suffix}",
        note + (f"▾ Published settings, of other models and losses: {marks}." if marks else ""),
        (axis, vertical),
        join(body),
        around=tag("g", *(_mark(value, who, axis) for value, who in published)),
        ticks=ticks,
    )


def _threshold_axis(
    groups: Sequence[Group], mode: str
) -> tuple[Axis, list[tuple[float, str]], dict[int, float]]:
    """Return the axis, its ticks, and the coordinate of each setting by its index.

    Settings without clipping lie beyond the highest threshold.
    """
    known = np.unique([g.threshold for g in groups if g.threshold is not None])
    low, high = float(known[0]), float(known[-1])
    factor = max(high / low, 2.0) ** 0.12
    unclipped = any(group.threshold is None for group in groups)
    end = high * factor * ((high * factor**2 / low) ** 0.16 if unclipped else 1.0)
    start = low / factor
    axis = Axis(start, end, True, f"clip.threshold, clip={mode}")
    ticks: list[tuple[float, str]] = []
    for value in map(float, known):
        if not ticks or across(axis, value) - across(axis, ticks[-1][0]) >= _APART:
            ticks.append((value, rounded(value)))
    if unclipped:
        ticks.append((start * (end / start) ** 0.95, "none"))
    right = float(across(axis, end)) - 0.05 * INNER_WIDTH
    places = {
        group.index: right if group.threshold is None else float(across(axis, group.threshold))
        for group in groups
    }
    return axis, ticks, places


def _means(
    found: Findings, groups: Sequence[Group], places: Mapping[int, float], vertical: Axis
) -> Markup:
    """Draw lines through the means of settings that differ in their threshold alone."""
    lines: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    clip = ("seed", "clip.mode", "clip.threshold")
    columns = [key for key in found.differences.columns if key not in clip]
    for group in groups:
        mean, _ = found.mean(group)
        if math.isfinite(mean):
            key = tuple(choice(group.runs[0], column) for column in columns)
            point = (places[group.index], float(upward(vertical, mean)))
            lines.setdefault(key, []).append(point)
    drawn = []
    for points in lines.values():
        xs, ys = np.asarray(sorted(points)).T
        drawn.append(tag("path", d=path(xs, ys), class_="means"))
    return join(drawn)


def _mark(value: float, who: str, axis: Axis) -> Markup:
    """Draw a small triangle above the axis at a published threshold."""
    return tag(
        "path",
        tag("title", f"{rounded(value)}: {who}"),
        d=f"M{float(across(axis, value)) - 5:.1f} {TOP - 10}h10l-5 8z",
        class_="published",
    )
