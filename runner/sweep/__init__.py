"""A sweep: its record, the runs still to do, and the live table.

All state is in ``sweep.json`` and in the folders of the runs. So a sweep that was killed, and runs
that a launcher starts in other processes, are handled in the same way.
"""
