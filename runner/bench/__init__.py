"""Measure how fast this project is, against the tools that people use otherwise.

One module a table, with a ``TITLE`` and a generator ``rows(setting)``; see ``README.md`` here.
"""

TABLES = ("clip", "parallel", "loop", "start")
"""Names of the tables, each a module of this package, in the order in which they are measured."""
