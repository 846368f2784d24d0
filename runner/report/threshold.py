"""The metric that each threshold led to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from runner.report.chart import (
    INNER_WIDTH,
    TOP,
    across,
    cross,
    dot,
    framed,
    path,
    upward,
)
from runner.report.curves import facets
from runner.report.findings import Findings
from runner.report.groups import Group, choice
from runner.report.literature import PUBLISHED
from runner.report.markup import Markup, join, tag
from runner.report.notation import percent, rounded
from runner.report.scale import Axis, covering

# Pixels between two texts under an axis.
_APART = 36


def metric_charts(found: Findings) -> list[Markup]:
    """The metric against the threshold, one chart a mode, one point a seed."""
    charts = []
    for mode, groups in facets(found.groups):
        if any(group.threshold is not None for group in groups) and found.metric:
            scored = [g for g in groups if any(found.score(run) is not None for run in g.runs)]
            if len(scored) > 1:
                charts.append(_metric_chart(found, mode, scored))
    return charts


def _metric_chart(found: Findings, mode: str, groups: Sequence[Group]) -> Markup:
    metric = found.metric or ""
    axis, ticks, right = _threshold_axis(groups, mode)
    every = np.asarray(
        [
            score
            for g in groups
            for run in g.runs
            for score in [found.score(run)]
            if score is not None
        ]
    )
    finite = every[np.isfinite(every) & (every > 0)]
    log = bool(len(finite) and finite.max() / finite.min() > 30 and not np.any(every <= 0))
    vertical = covering([every], log=log, title=f"best {metric}")
    body = [_means(found, groups, axis, vertical, right)]
    for group in groups:
        x = right if group.threshold is None else float(across(axis, group.threshold))
        for run in group.runs:
            score = found.score(run)
            if score is None:
                continue
            name = f"{group.label}, run {run.number}: best {metric} {rounded(score)}"
            name += f", {percent(found.measured[run.number].ratio)} of steps clipped"
            if math.isfinite(score):
                y = float(upward(vertical, score))
                whole = found.counts(run)
                name += "" if whole else f" ({run.state})"
                body.append(dot(x, y, group.color, name, group.index, whole))
            else:
                body.append(cross(x, TOP + 8, group.color, name, group.index))
    note = f"One point a run, a line through the means; {_direction(found)}. "
    note += "× diverged. " if not np.isfinite(every).all() else ""
    hollow = any(not found.counts(run) for group in groups for run in group.runs)
    note += "Hollow: did not finish, and counts for no mean. " if hollow else ""
    suffix = "" if len(facets(found.groups)) == 1 else f" · clip={mode}"
    return framed(
        f"metric-{mode}",
        f"Best {metric} against threshold{suffix}",
        note + _published(mode, axis),
        (axis, vertical),
        join(body),
        around=_marks(mode, axis),
        ticks=ticks,
    )


def _threshold_axis(
    groups: Sequence[Group], mode: str
) -> tuple[Axis, list[tuple[float, str]], float]:
    """The axis, its ticks, and where ``none`` stands: beyond the highest threshold."""
    known = np.unique([g.threshold for g in groups if g.threshold is not None])
    low, high = float(known[0]), float(known[-1])
    factor = max(high / low, 2.0) ** 0.12
    unclipped = any(group.threshold is None for group in groups)
    end = high * factor * ((high * factor**2 / low) ** 0.16 if unclipped else 1.0)
    start = low / factor
    axis = Axis(start, end, True, f"clip.threshold, clip={mode}")
    ticks: list[tuple[float, str]] = []
    for value in known:
        near = ticks and across(axis, value) - across(axis, ticks[-1][0]) < _APART
        if not near:
            ticks.append((float(value), rounded(float(value))))
    right = float(across(axis, end)) - 0.05 * INNER_WIDTH
    if unclipped:
        ticks.append((start * (end / start) ** 0.95, "none"))
    return axis, ticks, right


def _means(
    found: Findings, groups: Sequence[Group], axis: Axis, vertical: Axis, right: float
) -> Markup:
    """Lines through the means of settings that differ by their threshold alone."""
    lines: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    columns = [
        key
        for key in found.differences.columns
        if key not in ("seed", "clip.mode", "clip.threshold")
    ]
    for group in groups:
        mean, _ = found.mean(group)
        if not math.isfinite(mean):
            continue
        x = right if group.threshold is None else float(across(axis, group.threshold))
        key = tuple(choice(group.runs[0], column) for column in columns)
        lines.setdefault(key, []).append((x, float(upward(vertical, mean))))
    drawn = []
    for points in lines.values():
        xs, ys = np.asarray(sorted(points)).T
        drawn.append(tag("path", d=path(xs, ys), class_="means"))
    return join(drawn)


def _inside(mode: str, axis: Axis) -> list[tuple[float, str]]:
    return [(value, who) for value, who in PUBLISHED.get(mode, ()) if axis.low < value < axis.high]


def _marks(mode: str, axis: Axis) -> Markup:
    """A small triangle at the top of the axis for each published threshold."""
    marks = []
    for value, who in _inside(mode, axis):
        x = float(across(axis, value))
        marks.append(
            tag(
                "path",
                tag("title", f"{rounded(value)}: {who}"),
                d=f"M{x - 5:.1f} {TOP - 10}h10l-5 8z",
                class_="published",
            )
        )
    return tag("g", *marks)


def _published(mode: str, axis: Axis) -> str:
    marks = "; ".join(f"{rounded(value)} {who}" for value, who in _inside(mode, axis))
    return f"▾ Published settings, of other models and losses: {marks}." if marks else ""


def _direction(found: Findings) -> str:
    return "higher is better" if found.higher_is_better else "lower is better"
