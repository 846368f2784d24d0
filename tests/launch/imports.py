"""Tell what a rank imports while it trains, that the fork server had not imported for it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.compose.request import request
from runner.config.schema import RunConfig
from runner.launch import supervise
from runner.telemetry.sinks.sink import Sink
from runner.train.job import execute

LIBRARIES = ("runner", "torch", "torchvision", "numpy", "scipy", "sklearn", "hydra", "omegaconf")


def train(config: RunConfig, sinks: Sequence[Sink]) -> dict[str, Any]:
    """Train, and return the modules that this rank imported meanwhile."""
    before = set(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        execute(config, sinks, folder=Path(folder))
    imported = sorted(set(sys.modules) - before)
    return {"imported": [one for one in imported if one.partition(".")[0] in LIBRARIES]}


def main(words: Sequence[str]) -> None:
    """Print what the first rank of a run imports by itself, as JSON."""
    [job] = request(words, writes=False).jobs
    with tempfile.TemporaryDirectory() as folder:
        summary = supervise.train(job.config, Path(folder), [], train)
    print(json.dumps(summary["imported"]))
