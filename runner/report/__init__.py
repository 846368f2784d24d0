"""Write one ``report.html`` for the folder of a run or of a sweep, from their files alone.

In a notebook, `figures` returns the charts of the page and `frame` a table of the runs::

    from runner.report import figures, frame
    figures("outputs/sweeps/mine")["eval-loss"]
"""

from pathlib import Path
from typing import Any

from runner.report.exports import FORMATS, frame
from runner.report.findings import find
from runner.report.page import write
from runner.report.run import NoRunError, Run, read, read_run

__all__ = ["FORMATS", "NoRunError", "Run", "figures", "frame", "read", "read_run", "write"]


def figures(folder: Path | str) -> dict[str, Any]:
    """Return the charts of the page by name, such as ``eval-loss``, as figures of plotly."""
    from runner.report.sections import sections  # imports plotly, which readers need not wait for

    charts = sections(find(read(Path(folder)))).charts
    return {chart.key: chart.figure for chart in charts}
