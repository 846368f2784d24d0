"""The page that answers: reads the folder of a run or of a sweep, writes one ``report.html``.

    python -m runner report FOLDER [--open]

It reads files alone, of runs that finished, failed, were killed, or still go on, and imports
nothing else of this project.
"""

from runner.report.page import write
from runner.report.run import NoRunError, Run, read_run
from runner.report.sweep import SweepRuns, read, read_sweep

__all__ = ["NoRunError", "Run", "SweepRuns", "read", "read_run", "read_sweep", "write"]
