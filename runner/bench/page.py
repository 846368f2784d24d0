"""How long the page of a large sweep takes, and how large it is."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from runner.bench.pairs import Spread, clocked
from runner.bench.table import Row, Setting
from runner.clip import Decision
from runner.compose.request import request
from runner.config.identity import config_hash
from runner.report import write
from runner.run_folder import files, keys
from runner.run_folder.rows import JsonlSink
from runner.run_folder.status import Record, now
from runner.run_folder.sweep_record import Entry, SweepRecord
from runner.telemetry.meter import Meter
from runner.telemetry.step import StepMetrics

TITLE = "the page of a sweep (python -m runner report): seconds, and size"

SIZES = ((16, 10_000, 6.0, 4.0), (256, 1_000, 20.0, 12.0))
"""Runs, rows of each, and limits in seconds and in megabytes."""

QUICK = ((4, 200, 6.0, 4.0),)

ONE_RUN = (1.0, 2.0)
"""Limits of the page of one run."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table."""
    for runs, steps, *limits in QUICK if setting.quick else SIZES:
        folder = setting.folder / f"page-{runs}"
        make_sweep(folder, runs, steps)
        yield from _page(setting, folder, f"{runs} runs x {steps:,} rows", *limits)
        if runs == SIZES[0][0] or setting.quick:
            yield from _page(setting, folder / "0", f"one run of {steps:,} rows", *ONE_RUN)


def _page(
    setting: Setting, folder: Path, what: str, seconds: float, megabytes: float
) -> Iterator[Row]:
    """Write the page of a folder several times, and yield the time and the size that it takes."""
    times = [clocked(partial(write, folder)) for _ in range(setting.pairs(3))]
    yield Row(what, Spread.of(times), seconds, "s")
    size = (folder / files.PAGE).stat().st_size / 1e6
    yield Row(f"{what}, size", Spread.of([size]), megabytes, "MB")


def make_sweep(folder: Path, runs: int, steps: int) -> None:
    """Write the folder of a sweep over thresholds, with invented metrics."""
    folder.mkdir()
    [job] = request(["tracker=none"], writes=False).jobs
    entries = []
    for number in range(runs):
        own = folder / str(number)
        (own / files.HYDRA).mkdir(parents=True)
        threshold = round(0.01 * 1.03**number, 6)
        words = [f"clip.threshold={threshold}"]
        plain = {**job.plain, "clip": {**job.plain["clip"], "threshold": threshold}}
        (own / files.OVERRIDES).write_text(json.dumps(words))  # YAML too
        record = Record(own)
        record.begin(plain, config_hash(plain), None)
        record.summary(_train(own / files.ROWS, steps, threshold, folder / "0"))
        record.end("finished", 0, None, None)
        entries.append(Entry(number, own.name, words, words, config_hash(plain), "finished", 0))
    request_hash = config_hash(job.plain)
    record_of_all = SweepRecord(
        *("bench", ["-m"], request_hash, keys.EVAL_LOSS, False, None, ["clip.threshold"], runs),
        state="finished",
        started=now(),
        ended=now(),
        entries=entries,
    )
    record_of_all.write(folder)


def _train(rows: Path, steps: int, threshold: float, first: Path) -> dict[str, object]:
    """Write the rows of a run and return its summary; a later run repeats those of the first."""
    if rows.parent != first:
        shutil.copy(first / files.ROWS, rows)
        summary: dict[str, object] = json.loads((first / files.SUMMARY).read_text())
        return summary
    with JsonlSink(rows) as sink:
        meter = Meter([sink])
        for step in range(1, steps + 1):
            norm = 0.3 + math.exp(-step / steps) * (1.5 + math.sin(7.0 * step))
            after = min(norm, 1.0)
            share = float(norm > 1.0)
            numbers = (norm, after, after / norm, share, share, norm, threshold)
            loss = 0.1 + 2.2 * math.exp(-4 * step / steps) + 0.05 * math.sin(step)
            pushed = StepMetrics(step, loss, Decision(*numbers), 0.05, 32 * step, 0, 0.004)
            evaluated = {keys.EVAL_LOSS: 1.1 * loss} if step % max(1, steps // 10) == 0 else None
            meter.push(pushed, evaluated)
        meter.flush()
        facts = {"remarks": [], "guidance": [], keys.WALL_SECONDS: 0.004 * steps}
        return meter.summary() | facts | {"parameters": 1, "world_size": 1, "device": "cpu"}
