"""Measure how fast this project is, against the tools that people use otherwise."""

TABLES = {
    "clip": "runner.bench.clip:rows",
    "parallel": "runner.bench.parallel:rows",
    "step": "runner.bench.step:rows",
    "loop": "runner.bench.loop:rows",
    "start": "runner.bench.loop:start",
    "scale": "runner.bench.scale:rows",
}
"""Generators of the rows of each table, ``rows(setting)``; their docstrings are the titles."""
