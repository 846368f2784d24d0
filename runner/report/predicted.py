"""Charts of the share of steps that a threshold clips: predicted from norms, and observed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from runner.config.modes import info_of
from runner.report.chart import across, dot, framed, path, upward
from runner.report.findings import Findings, norms
from runner.report.groups import Facet, facets
from runner.report.markup import Markup, join, tag
from runner.report.notation import percent
from runner.report.palette import NEUTRAL
from runner.report.scale import Axis, covering
from runner.report.series import EMPTY, Floats, what_if

# Points of the drawn curve; the prediction uses every norm.
_POINTS = 240


@dataclass(frozen=True)
class Prediction:
    """Shares of steps that thresholds would have clipped.

    Attributes:
        thresholds: rising thresholds, shape (n,).
        shares: shares in 0..1, shape (n,).
        source: where the shares come from, in a sentence.
    """

    thresholds: Floats
    shares: Floats
    source: str

    def at(self, threshold: float) -> float | None:
        """Return the share at a threshold, interpolated on a log axis; None if none is known."""
        if not len(self.thresholds):
            return None
        logs = np.log(self.thresholds)
        return float(np.interp(math.log(threshold), logs, self.shares))


def ratio_charts(found: Findings) -> list[Markup]:
    """Return a chart of predicted and observed clip ratio against the threshold for each mode."""
    return [
        _chart(found, facet)
        for facet in facets(found.groups)
        if any(g.threshold is not None and found.ratio(g) is not None for g in facet.own)
    ]


def predict(found: Findings, mode: str) -> Prediction:
    """Predict from the runs which share of steps each threshold of a mode clips.

    If the mode limits ‖G‖, that is the share of the reference's ‖G‖ strictly above a threshold.
    What other modes measure is recorded by ``clip.what_if`` only.
    """
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
    if not recorded:
        none = "No run of this mode recorded clip.what_if, so none is predicted."
        return Prediction(EMPTY.steps, EMPTY.values, none)
    # The run that clipping changed least.
    _, number, shares = min(recorded, key=lambda entry: entry[:2])
    at, above = np.asarray(list(shares)), np.asarray(list(shares.values()))
    return Prediction(at, above, f"Line: what run {number} recorded by clip.what_if.")


def _chart(found: Findings, facet: Facet) -> Markup:
    predicted = predict(found, facet.mode)
    groups = [(group, group.threshold) for group in facet.own if group.threshold is not None]
    tried = np.asarray([threshold for _, threshold in groups])
    axis = covering([tried, predicted.thresholds], log=True, title="threshold")
    vertical = Axis(-0.03, 1.03, False, "share of steps clipped", True)
    body = []
    if len(predicted.thresholds):
        line = path(across(axis, predicted.thresholds), upward(vertical, predicted.shares))
        body.append(tag("path", d=line, class_="curve", stroke=NEUTRAL, data_name="predicted"))
    for group, threshold in groups:
        expected = predicted.at(threshold)
        for run in group.runs:
            ratio = found.measured[run.number].ratio
            if ratio is None or not math.isfinite(ratio):
                continue
            name = f"{group.label}, run {run.number}: clipped {percent(ratio)} of its steps"
            name += "" if expected is None else f"; predicted {percent(expected)}"
            x, y = float(across(axis, threshold)), float(upward(vertical, ratio))
            body.append(dot(x, y, group.color, name, group.index))
    return framed(
        f"predicted-{facet.mode}",
        f"Predicted against observed clip ratio{facet.suffix}",
        f"{predicted.source} Points: observed by runs. A point off the line means that clipping "
        "changed the norms themselves.",
        (axis, vertical),
        join(body),
    )
