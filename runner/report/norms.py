"""The distribution of the unclipped norms, and the percentile of each threshold in it."""

from __future__ import annotations

import numpy as np

from runner.report.chart import INNER_HEIGHT, TOP, across, framed, upward, vertical
from runner.report.findings import Findings, norms
from runner.report.groups import Group
from runner.report.markup import Markup, join, tag
from runner.report.notation import percent, rounded
from runner.report.scale import Axis, covering
from runner.report.series import Floats

_BINS = 60
# Rows for the labels of thresholds, and the width of one label in pixels.
_ROWS, _LABEL = 4, 78


def histogram(found: Findings) -> Markup | None:
    """Return a histogram of the norms of the least clipped setting; None without any norm.

    Each threshold of ``clip=norm`` is marked with its percentile: at p90 one step in ten would have
    been clipped.
    """
    reference = found.reference()
    if reference is None:
        return None
    values = np.sort(norms(reference))
    thresholds = {
        group.threshold: group
        for group in reversed(found.groups)
        if group.info.limits_norm and group.threshold is not None
    }
    marked = sorted(thresholds.items(), key=lambda entry: entry[0])
    axis = covering([values, np.asarray(list(thresholds))], log=True, title="‖G‖ before clipping")
    edges = np.geomspace(values[0] * 0.999, values[-1] * 1.001, _BINS + 1)
    counts, _ = np.histogram(values, edges)
    shares = counts / len(values)
    # Room above the highest bar for the labels of the thresholds.
    tall = Axis(0.0, float(shares.max()) * 1.35, False, "share of steps", True)
    bars = [
        _bar(axis, tall, float(low), float(high), float(share))
        for low, high, share in zip(edges, edges[1:], shares, strict=False)
        if share
    ]
    ratio = found.ratio(reference)
    note = f"All steps of “{reference.label}”, {len(values):,} norms. "
    if ratio:
        note += f"No run went unclipped; this one was clipped least ({percent(ratio)} of steps). "
    if marked:
        note += "p90 at a threshold: 90 % of these norms lie at or below it."
    else:
        note += "No threshold here is a value of ‖G‖, so none is marked."
    return framed(
        "histogram",
        "Norms without clipping" if not reference.clips else "Norms before clipping",
        note,
        (axis, tall),
        join(bars),
        around=_thresholds(marked, values, axis),
    )


def _bar(axis: Axis, tall: Axis, low: float, high: float, share: float) -> Markup:
    left, right = float(across(axis, low)), float(across(axis, high))
    top = float(upward(tall, share))
    name = f"‖G‖ {rounded(low, 3)} to {rounded(high, 3)}: {percent(share)} of steps"
    return tag(
        "rect",
        tag("title", name),
        x=left,
        y=top,
        width=max(right - left - 0.5, 0.5),
        height=TOP + INNER_HEIGHT - top,
        class_="bar",
        data_tip=name,
    )


def _thresholds(marked: list[tuple[float, Group]], values: Floats, axis: Axis) -> Markup:
    """Draw each threshold as a line, with its percentile of the sorted ``values``."""
    parts = []
    # Right end of the last label in each row; a label is drawn in the first row with room.
    ends = [-np.inf] * _ROWS
    for threshold, group in marked:
        below = np.searchsorted(values, threshold, side="right") / len(values)
        x = float(across(axis, threshold))
        text = f"{rounded(threshold)} · p{rounded(100 * float(below), 3)}"
        parts.append(vertical(x, group.color, text, group.index))
        row = next((i for i, end in enumerate(ends) if x - _LABEL / 2 > end), None)
        if row is None:
            continue
        ends[row] = x + _LABEL / 2
        y = TOP + 10 + 13 * row
        parts.append(tag("text", text, x=x, y=y, class_="mark", text_anchor="middle"))
    return tag("g", *parts)
