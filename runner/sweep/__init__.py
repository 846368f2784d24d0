"""A sweep: its record, the runs still to do, and the live table.

All state is in ``sweep.json`` and in the folders of the runs. So a sweep that was killed, and runs
that a launcher starts in other processes, are handled in the same way.
"""

from runner.run_folder.sweep_record import Entry, SweepRecord
from runner.sweep.control import run_sweep
from runner.sweep.resume import plan_runs

__all__ = ["Entry", "SweepRecord", "plan_runs", "run_sweep"]
