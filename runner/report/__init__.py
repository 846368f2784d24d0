"""Write one ``report.html`` for the folder of a run or of a sweep.

    python -m runner report FOLDER [--open]

The runs may have finished, failed, been killed, or still be running: only their files are read.
"""

from runner.report.page import write
from runner.report.run import NoRunError, Run, read_run
from runner.report.sweep import SweepRuns, read, read_sweep

__all__ = ["NoRunError", "Run", "SweepRuns", "read", "read_run", "read_sweep", "write"]
