"""A sweep: its record, the runs still to do, and the live table."""
