"""How the unclipped norms are spread, and where each threshold cuts them."""

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
# Rows in which the texts of thresholds stand, and pixels that one text takes.
_ROWS, _TEXT = 4, 78


def histogram(found: Findings) -> Markup | None:
    """The norms of the least clipped setting on a log axis; None where no norm was recorded.

    Each threshold of ``clip=norm`` is marked with the percentile that it stands at: at p90 one step
    in ten would have been clipped.
    """
    reference = found.reference()
    if reference is None:
        return None
    values = norms(reference)
    marked = _marked(found)
    limits = [values, np.asarray([threshold for threshold, _ in marked])]
    axis = covering(limits, log=True, title="‖G‖ before clipping")
    edges = np.geomspace(values.min() * 0.999, values.max() * 1.001, _BINS + 1)
    counts, _ = np.histogram(values, edges)
    shares = counts / len(values)
    # Air above the highest bar, where the thresholds' texts stand.
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
        "Norms without clipping" if reference.mode == "none" else "Norms before clipping",
        note,
        (axis, tall),
        join(bars),
        around=_thresholds(marked, values, axis),
    )


def _marked(found: Findings) -> list[tuple[float, Group]]:
    """Each threshold of ``clip=norm`` once, rising."""
    marked = {
        group.threshold: group
        for group in reversed(found.groups)
        if group.mode == "norm" and group.threshold is not None
    }
    return sorted(marked.items(), key=lambda entry: entry[0])


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
    ordered = np.sort(values)
    parts = []
    # The right end of the last text in each row; a text takes the first row with room.
    ends = [-np.inf] * _ROWS
    for threshold, group in marked:
        below = np.searchsorted(ordered, threshold, side="right") / len(ordered)
        x = float(across(axis, threshold))
        text = f"{rounded(threshold)} · p{rounded(100 * float(below), 3)}"
        parts.append(vertical(x, group.color, "level", text, group.index))
        row = next((i for i, end in enumerate(ends) if x - _TEXT / 2 > end), None)
        if row is None:
            continue
        ends[row] = x + _TEXT / 2
        y = TOP + 10 + 13 * row
        parts.append(tag("text", text, x=x, y=y, class_="mark", text_anchor="middle"))
    return tag("g", *parts)
