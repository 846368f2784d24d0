"""A sweep: its record, what is left of it to do, and what is said while it runs.

The record, ``sweep.json``, and the folders of the runs are the only truth, so that a sweep that was
killed, and runs that a launcher starts in other processes, are understood alike.
"""

from runner.run_folder.objective import objective_of
from runner.sweep.control import run_sweep
from runner.sweep.record import Entry, SweepRecord
from runner.sweep.resume import plan_runs

__all__ = ["Entry", "SweepRecord", "objective_of", "plan_runs", "run_sweep"]
