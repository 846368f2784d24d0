"""Measure how fast this project is, against the tools that people use otherwise.

One module a table. Each has a ``TITLE`` and a generator ``rows(setting)``; what the tables share
is in :mod:`runner.bench.pairs` (timing) and :mod:`runner.bench.table` (rows, and how they read).
"""

TABLES = ("clip", "adaptive", "value", "methods", "backward", "parallel", "loop", "start")
"""Names of the tables, each a module of this package, in the order in which they are measured."""

ON_REQUEST = ("methods", "backward")
"""Tables that are measured where they are named, or with ``--quick``: they take as long again."""
