"""All charts of a run or a sweep, for the page and for a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import plotly.graph_objects as go

from runner.report.curves import clip_charts, loss_charts
from runner.report.findings import Findings, find
from runner.report.heat import heat_maps
from runner.report.plotting import Chart
from runner.report.predicted import threshold_charts
from runner.report.rates import parallel, rate_charts
from runner.report.sweep import read
from runner.report.threshold import metric_charts

Sections = list[tuple[str, list[Chart], str | None]]
"""Heading, charts, and a note on what is left out."""


def figures(folder: Path | str) -> dict[str, go.Figure]:
    """Return the charts of the page by name, such as ``eval-loss``, as figures of plotly."""
    found = find(read(Path(folder)))
    return {one.key: one.figure for _, charts, _ in sections(found) for one in charts}


def sections(found: Findings) -> Sections:
    """Return the charts of the page in order, without sections that have none."""
    maps, left = heat_maps(found)
    every: list[tuple[str, Iterable[Chart], str | None]] = [
        ("Metric", [*metric_charts(found), *rate_charts(found), *parallel(found)], None),
        ("Loss", loss_charts(found.groups), None),
        ("Gradient norm and clipping", clip_charts(found.groups), None),
        ("Choosing a threshold", threshold_charts(found), None),
        ("By parameter", maps, left),
    ]
    listed = [(title, list(charts), note) for title, charts, note in every]
    return [section for section in listed if section[1]]
