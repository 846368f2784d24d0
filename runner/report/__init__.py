"""Write one ``report.html`` for the folder of a run or of a sweep, from their files alone.

In a notebook, `figures` returns the charts of the page and `frame` a table of the runs::

    from runner.report import figures, frame
    figures("outputs/sweeps/mine")["eval-loss"]
"""

from typing import Any

from runner.report.page import write
from runner.report.run import NoRunError, Run, read, read_run
from runner.report.table import FORMATS, frame

__all__ = ["FORMATS", "NoRunError", "Run", "frame", "read", "read_run", "write"]


def __getattr__(name: str) -> Any:
    if name != "figures":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runner.report.charts import figures  # imports plotly, which readers need not wait for

    return figures
