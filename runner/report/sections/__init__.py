"""Which charts the page has: each file here makes plain tables, and `charts` draws them."""

from __future__ import annotations

from typing import NamedTuple

from runner.report.charts import layers
from runner.report.figure import Chart
from runner.report.findings import Findings
from runner.report.sections.axes import axes_of
from runner.report.sections.clipping import clipping_charts
from runner.report.sections.colors import colors_of
from runner.report.sections.losses import loss_charts
from runner.report.sections.metric import metric_charts
from runner.report.sections.tables import Tables

__all__ = ["Sections", "axes_of", "colors_of", "sections"]

MOST_FIGURES = 14
_MAPS = 3  # most maps of parameters


class Sections(NamedTuple):
    """The charts of the page, in its order."""

    answer: list[Chart]
    clipping: list[Chart]
    curves: list[Chart]
    parameters: list[Chart]

    @property
    def charts(self) -> list[Chart]:
        return [*self.answer, *self.clipping, *self.curves, *self.parameters]


def sections(findings: Findings) -> Sections:
    """Return the charts of a sweep. A page of a single run begins with its norms."""
    tables = Tables(findings)
    answer = metric_charts(tables)
    clipping = clipping_charts(tables)
    losses = loss_charts(tables)
    if not answer:
        first = clipping or losses
        answer = first[:1]
        del first[:1]
    room = MOST_FIGURES - len(answer) - len(clipping) - len(losses)
    maps = layers.draw(tables.layers[: max(0, min(room, _MAPS))])
    return Sections(answer, clipping, losses, maps)
