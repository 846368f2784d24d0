"""Measure how fast this project is, against the tools that people use otherwise."""

TABLES = ("clip", "parallel", "loop", "start")
"""Names of the tables, each a module with a ``TITLE`` and a generator ``rows(setting)``."""
