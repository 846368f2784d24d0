"""Charts for choosing a threshold: the norms, and the share of steps that each threshold clips."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from runner.config.modes import info_of
from runner.report.findings import Findings, norms, scaled_note
from runner.report.groups import Facet, Group, facets
from runner.report.notation import percent, rounded
from runner.report.palette import NEUTRAL
from runner.report.plotting import FRAME, Chart, axis, chart, floats, labels, limits, line, points
from runner.report.series import Floats, what_if

_BINS = 60
# Rows for the labels of thresholds, and the width of one label as a part of the axis.
_ROWS, _LABEL = 12, 0.3
# Points of the drawn curve; the prediction uses every norm.
_POINTS = 240


def threshold_charts(found: Findings) -> Iterator[Chart]:
    """Yield the histogram of the norms, and for each mode the clip ratio against the threshold."""
    if (reference := found.reference()) is not None:
        yield _histogram(found, reference)
    for facet in facets(found.groups):
        if any(g.threshold is not None and found.ratio(g) is not None for g in facet.own):
            yield _ratios(found, facet)


def _histogram(found: Findings, reference: Group) -> Chart:
    """Return a histogram of the norms of the least clipped setting."""
    values = np.sort(norms(reference))
    marked = {
        group.threshold: group
        for group in reversed(found.groups)
        if group.info.limits_norm and group.threshold is not None
    }
    ends = limits([values, list(marked)], True)
    edges = np.geomspace(values[0] * 0.999, values[-1] * 1.001, _BINS + 1)
    shares = np.histogram(values, edges)[0] / len(values)
    top = float(shares.max())
    bars = {
        **line(None, floats(np.repeat(edges, 2)), floats([0, *np.repeat(shares, 2), 0]), "steps"),
        "fill": "tozeroy",
        "line": {"width": 0.5, "color": NEUTRAL},
        "hoveron": "points",
        "hovertemplate": "‖G‖ about %{x:.3~g}: %{y:.2~%} of steps<extra></extra>",
    }
    traces = [bars]
    # A label stands right of the end of its line. Where lines are close, the next one is shorter,
    # so that no line crosses a label.
    row, end, width = 0, -np.inf, np.log(ends[1] / ends[0])
    for threshold, group in sorted(marked.items()):
        below = float(np.searchsorted(values, threshold, side="right")) / len(values)
        text = f"{rounded(threshold)} · p{rounded(100 * below, 3)}"
        at = float(np.log(threshold / ends[0]) / width)
        row = 0 if at > end else row + 1
        height = top * max(1.38 - 0.09 * row, 0.1)
        mark = line(group, [threshold] * 2, [0, height], text, line={"dash": "6px,4px"})
        traces.append(mark | {"hovertemplate": f"{text}<extra></extra>"})
        if row < _ROWS:
            end = max(end, at + _LABEL)
            own = {key: mark[key] for key in ("legendgroup", "meta")}
            side = {"textposition": "middle right"}
            traces.append(labels([threshold], [height], [f" {text}"], **side, **own))
    note = f"All steps of “{reference.label}”, {len(values):,} norms. "
    if ratio := found.ratio(reference):
        note += f"No run went unclipped; this one was clipped least ({percent(ratio)} of steps). "
    if marked:
        note += "p90 at a threshold: 90 % of these norms lie at or below it."
    else:
        note += "No threshold here is a value of ‖G‖, so none is marked."
    note += scaled_note([reference])
    title = "Norms without clipping" if not reference.clips else "Norms before clipping"
    x = axis("‖G‖ before clipping", ends, log=True, showgrid=False)
    y_axis = axis("share of steps", (0.0, top * 1.46), percent=True)
    return chart("histogram", title, note, traces, x, y_axis, margin=FRAME | {"r": 64})


@dataclass(frozen=True)
class Prediction:
    """Shares of steps that thresholds would have clipped."""

    thresholds: Floats
    shares: Floats
    source: str

    def at(self, threshold: float) -> float | None:
        """Return the share at a threshold, interpolated on a log axis; None if none is known."""
        if not len(self.thresholds):
            return None
        return float(np.interp(math.log(threshold), np.log(self.thresholds), self.shares))


def predict(found: Findings, mode: str) -> Prediction:
    """Predict from the runs which share of steps each threshold of a mode clips."""
    reference = found.reference()
    info = next((group.info for group in found.groups if group.mode == mode), info_of(mode))
    if info.limits_norm and reference is not None:
        measured = np.sort(norms(reference))
        tried = [g.threshold for g in found.groups if g.mode == mode and g.threshold is not None]
        some = np.linspace(0, len(measured) - 1, min(len(measured), _POINTS)).astype(int)
        at = np.unique(np.concatenate((measured[some], tried)))
        above = 1 - np.searchsorted(measured, at, side="right") / len(measured)
        source = f"Line: share of the steps of “{reference.label}” whose ‖G‖ lies above."
        return Prediction(at, above, source)
    recorded = [
        (found.ratio(group) or 0.0, run.number, shares)
        for group in found.groups
        for run in group.runs
        if group.mode == mode and (shares := what_if(run.series))
    ]
    # The run that clipping changed least.
    _, number, shares = min(recorded, key=lambda entry: entry[:2], default=(0.0, "", {}))
    if recorded:
        source = f"Line: what run {number} recorded by clip.what_if."
    elif info.follows == "norms":
        source = "This mode derives its limit from the norms so far, so no share is predicted."
    else:
        source = "No run of this mode recorded clip.what_if, so none is predicted."
    return Prediction(np.array(list(shares)), np.array(list(shares.values())), source)


def _ratios(found: Findings, facet: Facet) -> Chart:
    predicted = predict(found, facet.mode)
    groups = [(group, group.threshold) for group in facet.own if group.threshold is not None]
    ends = limits([[threshold for _, threshold in groups], predicted.thresholds], True)
    x, y = floats(predicted.thresholds), floats(predicted.shares)
    traces = [line(None, x, y, "predicted", hovertemplate="%{x:.4~g}: %{y:.2~%} of steps")]
    for group, threshold in groups:
        expected = predicted.at(threshold)
        for run in group.runs:
            ratio = found.measured[run.number].ratio
            if ratio is None or not math.isfinite(ratio):
                continue
            name = f"{group.label}, run {run.number}: clipped {percent(ratio)} of its steps"
            name += "" if expected is None else f"; predicted {percent(expected)}"
            traces.append(points(group, [threshold], [ratio], [name], run=run.number))
    note = f"{predicted.source} Points: observed by runs. A point off the line means that clipping "
    note += "changed the norms themselves."
    title = f"Predicted against observed clip ratio{facet.suffix}"
    x_axis = axis("threshold", ends, log=True, showgrid=False)
    y_axis = axis("share of steps clipped", (-0.03, 1.03), percent=True)
    return chart(f"predicted-{facet.mode}", title, note, traces, x_axis, y_axis)
