"""The files of a run and of a sweep: their names, and how they are written and read."""
