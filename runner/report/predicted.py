"""The share of steps that a threshold would clip: predicted from norms, and as it turned out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runner.report.chart import across, dot, framed, path, upward
from runner.report.curves import facets
from runner.report.findings import Findings, norms
from runner.report.groups import Group
from runner.report.markup import Markup, join, tag
from runner.report.notation import percent
from runner.report.palette import NEUTRAL
from runner.report.scale import Axis, covering
from runner.report.series import EMPTY, Floats, what_if

# Points of the drawn curve; the prediction itself is of every norm.
_POINTS = 240


@dataclass(frozen=True)
class Prediction:
    """Shares of steps that thresholds would have clipped.

    Attributes:
        thresholds: rising, shape (n,).
        shares: in 0..1, of the same shape.
        source: where they are from, in a sentence.
    """

    thresholds: Floats
    shares: Floats
    source: str

    def at(self, threshold: float) -> float | None:
        """The share at a threshold, between those known on a log axis; None where none is."""
        if not len(self.thresholds):
            return None
        logs = np.log(self.thresholds)
        return float(np.interp(math.log(threshold), logs, self.shares))


def ratio_charts(found: Findings) -> list[Markup]:
    """Predicted and observed clip ratio against the threshold, one chart a mode."""
    charts = []
    for mode, members in facets(found.groups):
        groups = [g for g in members if g.mode == mode and g.threshold is not None]
        if any(found.ratio(group) is not None for group in groups):
            charts.append(_chart(found, mode, groups))
    return charts


def predict(found: Findings, mode: str) -> Prediction:
    """What the runs tell about thresholds of a mode.

    For ``norm`` that is the share of the reference's ‖G‖ strictly above a threshold. Other modes
    measure elements or units, of which only ``clip.what_if`` keeps a record.
    """
    reference = found.reference()
    if mode == "norm" and reference is not None:
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
        for shares in [what_if(run.series)]
        if shares and group.mode == mode
    ]
    if not recorded:
        none = "No run of this mode recorded clip.what_if, so none is predicted."
        return Prediction(EMPTY.steps, EMPTY.values, none)
    # The run that clipping disturbed least.
    _, number, shares = min(recorded, key=lambda entry: entry[:2])
    at, above = np.asarray(list(shares)), np.asarray(list(shares.values()))
    return Prediction(at, above, f"Line: what run {number} recorded by clip.what_if.")


def _chart(found: Findings, mode: str, groups: Sequence[Group]) -> Markup:
    predicted = predict(found, mode)
    tried = np.asarray([group.threshold for group in groups])
    axis = covering([tried, predicted.thresholds], log=True, title="threshold")
    vertical = Axis(-0.03, 1.03, False, "share of steps clipped", True)
    body = []
    if len(predicted.thresholds):
        line = path(across(axis, predicted.thresholds), upward(vertical, predicted.shares))
        body.append(tag("path", d=line, class_="curve", stroke=NEUTRAL, data_name="predicted"))
    for group in groups:
        for run in group.runs:
            ratio = found.measured[run.number].ratio
            if ratio is None or group.threshold is None or not math.isfinite(ratio):
                continue
            expected = predicted.at(group.threshold)
            name = f"{group.label}, run {run.number}: clipped {percent(ratio)} of its steps"
            name += "" if expected is None else f"; predicted {percent(expected)}"
            x, y = float(across(axis, group.threshold)), float(upward(vertical, ratio))
            body.append(dot(x, y, group.color, name, group.index))
    suffix = "" if len(facets(found.groups)) == 1 else f" · clip={mode}"
    return framed(
        f"predicted-{mode}",
        f"Predicted against observed clip ratio{suffix}",
        f"{predicted.source} Points: what runs observed. A point off the line means that clipping "
        "changed the norms themselves.",
        (axis, vertical),
        join(body),
    )
