"""Charts over the threshold: the metric it led to, and the share of steps it clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from runner.report.chart import (
    INNER_WIDTH,
    TOP,
    across,
    cross,
    framed,
    path,
    upward,
)
from runner.report.curves import facets
from runner.report.figures import higher_is_better
from runner.report.findings import Findings, norms
from runner.report.groups import Group, choice
from runner.report.literature import PUBLISHED
from runner.report.markup import Markup, join, tag
from runner.report.notation import figure, percent
from runner.report.rows import Floats, what_if
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


def ratio_charts(found: Findings) -> list[Markup]:
    """The share of steps that a threshold would clip, as predicted, and as it did."""
    charts = []
    for mode, members in facets(found.groups):
        groups = [g for g in members if g.mode == mode and g.threshold is not None]
        if any(found.ratio(group) is not None for group in groups):
            charts.append(_ratio_chart(found, mode, groups))
    return charts


def edge_warning(found: Findings) -> str | None:
    """That the best threshold is the lowest or highest tried, so that a better may lie beyond."""
    best = next(iter(found.ranked()), None)
    if best is None or best.threshold is None:
        return None
    tried = {group.threshold for group in found.groups if group.mode == best.mode}
    known = sorted(value for value in tried if value is not None)
    if len(known) < 2:
        return None
    if best.threshold == known[0]:
        return (
            f"The best threshold, {figure(known[0])}, is the lowest tried: "
            f"a lower one may do better (try {figure(known[0] / 2)} and {figure(known[0] / 4)})."
        )
    # Beyond the highest threshold lies no clipping at all: where that was tried, nothing is open.
    unclipped = any(group.mode == "none" and found.scores(group) for group in found.groups)
    if best.threshold == known[-1] and not unclipped:
        return (
            f"The best threshold, {figure(known[-1])}, is the highest tried: a higher one, or "
            f"none, may do better (try {figure(known[-1] * 2)} and clip=none)."
        )
    return None


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
            name = f"{group.label}, run {run.number}: best {metric} {figure(score)}"
            name += f", {percent(found.figures[run.number].ratio)} of steps clipped"
            if math.isfinite(score):
                y = float(upward(vertical, score))
                whole = found.counts(run)
                name += "" if whole else f" ({run.state})"
                body.append(_dot(x, y, group, name, whole))
            else:
                body.append(cross(x, TOP + 8, group.color, name, group.index))
    note = f"One point a run, a line through the means; {_direction(metric)}. "
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


def _ratio_chart(found: Findings, mode: str, groups: Sequence[Group]) -> Markup:
    reference = found.reference()
    thresholds, shares, source = _predicted(found, mode, groups, reference)
    limits = [np.asarray([g.threshold for g in groups if g.threshold is not None]), thresholds]
    axis = covering(limits, log=True, title="threshold")
    vertical = Axis(-0.03, 1.03, False, "share of steps clipped", True)
    body = []
    if len(thresholds):
        xs, ys = across(axis, thresholds), upward(vertical, shares)
        body.append(
            tag("path", d=path(xs, ys), class_="curve", stroke="#5b6470", data_name="predicted")
        )
    for group in groups:
        for run in group.runs:
            ratio = found.figures[run.number].ratio
            if ratio is None or group.threshold is None or not math.isfinite(ratio):
                continue
            x, y = float(across(axis, group.threshold)), float(upward(vertical, ratio))
            name = f"{group.label}, run {run.number}: clipped {percent(ratio)} of its steps"
            if len(thresholds):
                expected = float(np.interp(math.log(group.threshold), np.log(thresholds), shares))
                name += f"; predicted {percent(expected)}"
            body.append(_dot(x, y, group, name))
    suffix = "" if len(facets(found.groups)) == 1 else f" · clip={mode}"
    return framed(
        f"predicted-{mode}",
        f"Predicted against observed clip ratio{suffix}",
        f"{source} Points: what runs observed. A point off the line means that clipping changed "
        "the norms themselves.",
        (axis, vertical),
        join(body),
    )


def _predicted(
    found: Findings, mode: str, groups: Sequence[Group], reference: Group | None
) -> tuple[Floats, Floats, str]:
    """Rising thresholds, the share of steps each would have clipped, and where that is from."""
    if mode == "norm" and reference is not None:
        measured = np.sort(norms(reference))
        at = measured[np.linspace(0, len(measured) - 1, min(len(measured), 240)).astype(int)]
        at = np.unique(at)
        # Clipped is what lies above the threshold, not on it.
        above = 1 - np.searchsorted(measured, at, side="right") / len(measured)
        return at, above, f"Line: share of the steps of “{reference.label}” whose ‖G‖ lies above."
    recorded = [
        (found.ratio(group) or 0.0, run.number, shares)
        for group in groups
        for run in group.runs
        for shares in [what_if(run.series)]
        if shares
    ]
    if not recorded:
        nothing = np.empty(0)
        return nothing, nothing, "No run of this mode recorded clip.what_if, so none is predicted."
    _, number, shares = min(recorded, key=lambda entry: entry[:2])
    source = f"Line: what run {number} recorded by clip.what_if."
    return np.asarray(list(shares)), np.asarray(list(shares.values())), source


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
            ticks.append((float(value), figure(float(value))))
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


def _dot(x: float, y: float, group: Group, name: str, whole: bool = True) -> Markup:
    return tag(
        "circle",
        tag("title", name),
        cx=x,
        cy=y,
        r=4.5,
        fill=group.color if whole else "#fff",
        stroke=None if whole else group.color,
        class_="point" if whole else "hollow",
        data_group=group.index,
        data_tip=name,
    )


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
                tag("title", f"{figure(value)}: {who}"),
                d=f"M{x - 5:.1f} {TOP - 10}h10l-5 8z",
                class_="published",
            )
        )
    return tag("g", *marks)


def _published(mode: str, axis: Axis) -> str:
    marks = "; ".join(f"{figure(value)} {who}" for value, who in _inside(mode, axis))
    return f"▾ Published settings, of other models and losses: {marks}." if marks else ""


def _direction(metric: str) -> str:
    return "higher is better" if higher_is_better(metric) else "lower is better"
