"""Measure how fast this project is, against the tools that people use otherwise."""

TABLES = {
    "clip": "runner.bench.clip:rows",
    "parallel": "runner.bench.parallel:rows",
    "step": "runner.bench.step:rows",
    "loop": "runner.bench.loop:rows",
    "start": "runner.bench.loop:start",
    "scale": "runner.bench.scale:rows",
    "check": "runner.bench.check:rows",
    "parity": "runner.bench.parity:rows",
    "gpu": "runner.bench.gpu:rows",
}
"""Generators of the rows of each table, ``rows(setting)``; their docstrings are the titles."""
ON_GPU = ("clip", "gpu")
"""Tables that measure on a GPU; the last one needs it."""

DOCUMENTS = {"parity": {"md": "runner.bench.parity:markdown", "html": "runner.bench.parity:page"}}
"""Tables whose rows have a text of their own, each with what makes documents of the rows."""

WITH = (
    "torchtitan",
    "megatron-core",
    "deepspeed",
    "colossalai",
    "mosaicml",
    "ai2-olmo-core",
    "nemo-automodel",
)
"""Packages that ``--with`` installs, each in an environment of its own, for the table parity."""
