"""Measure on local ranks, which the launcher of runs starts."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from runner.bench.pairs import Side
from runner.bench.table import Row, Setting
from runner.compose.request import request
from runner.config.schema import RunConfig
from runner.launch.supervise import train
from runner.telemetry.sinks.sink import Sink

Measure = Callable[[Setting], list[Row]]


def on_ranks(measure: Measure, number: int, setting: Setting) -> list[Row]:
    """Run ``measure`` on ``number`` ranks, joined by gloo; return the rows of the first one."""
    words = ["plugin=ddp", f"plugin.nproc={number}", "tracker=none", "device=cpu"]
    [job] = request(words, writes=False).jobs
    folder = setting.folder / f"ranks-{secrets.token_hex(3)}"
    folder.mkdir()
    ended = train(job.config, folder, [], partial(_work, measure, setting))
    rows: list[Row] = ended["rows"]
    return rows


def _work(
    measure: Measure, setting: Setting, config: RunConfig, sinks: Sequence[Sink]
) -> dict[str, Any]:
    # Of torch's own clipping on a 2-D mesh, which is slow for the reason that it gives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return {"rows": measure(setting)}


def slowest(side: Side, prepare: Callable[[], object] = lambda: None) -> Side:
    """Return a side that all ranks begin at once, with the seconds of the slowest rank."""

    def timed() -> float:
        prepare()
        dist.barrier()
        seconds = torch.tensor(side(), dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    return timed
