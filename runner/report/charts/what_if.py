"""The share of steps that other thresholds would have clipped, as ``clip.what_if`` recorded it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from runner.report import figure
from runner.report.figure import Chart, Entry, Trace


class Recorded(NamedTuple):
    """Shares by threshold that a run recorded; ``clipped`` is its own threshold and share."""

    entry: Entry
    run: str
    shares: Mapping[float, float]
    clipped: tuple[float, float] | None
    text: str


def draw(*, name: str, title: str, note: str, recorded: Sequence[Recorded]) -> Chart:
    """Draw the recorded shares over thresholds, and a mark where a run has clipped."""
    traces: list[Trace] = []
    for run in recorded:
        xs = [*run.shares]
        ys = [*run.shares.values()]
        style: Trace = {"run": run.run, "mode": "lines+markers"}
        traces.append(figure.line(run.entry, xs, ys, run.entry.label, **style))
        if run.clipped is not None:
            threshold, share = run.clipped
            diamond = {"symbol": "diamond"}
            traces.append(figure.point(run.entry, run.run, threshold, share, run.text, **diamond))
    ends = figure.limits([trace["x"] for trace in traces], True)
    x_axis = figure.axis("threshold", ends, log=True, showgrid=False)
    y_axis = figure.axis("share of steps", (-0.03, 1.03), percent=True)
    return figure.chart(name, title, note, traces, x_axis, y_axis)
