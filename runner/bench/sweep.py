"""What each further run of a sweep takes besides its training."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from runner.bench.commands import run
from runner.bench.pairs import Spread
from runner.bench.table import Row, Setting
from runner.run_folder import files, keys
from runner.run_folder.rows import read_rows
from runner.run_folder.strict_json import read_object

TITLE = (
    "each further run of a sweep: seconds from the end of one run to that of the next, less steps"
)

TASK = [
    *("data=synthetic", "data.samples=128", "data.test_samples=32"),
    *("train.max_duration=4ba", "eval.interval=4ba"),
]
"""A training of a few milliseconds."""

KINDS: dict[str, tuple[list[str], int, float]] = {
    "single, wandb offline": (["tracker.mode=offline"], 16, 0.3),
    "single, no tracker": (["tracker=none"], 16, 0.3),
    "ddp on 4 ranks, wandb offline": (
        ["plugin=ddp", "plugin.nproc=4", "tracker.mode=offline"],
        9,
        0.8,
    ),
}
"""Overrides, number of runs, and limit in seconds."""

QUICK: dict[str, tuple[list[str], int, float]] = {
    "single, wandb offline": (["tracker.mode=offline"], 2, 0.3),
}


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; one sweep for each row."""
    for number, (what, asked) in enumerate((QUICK if setting.quick else KINDS).items()):
        words, runs, limit = asked
        runs = runs if setting.rounds is None else setting.rounds + 1
        folder = setting.folder / f"sweep-{number}"
        seeds = ",".join(map(str, range(runs)))
        where = f"hydra.sweep.dir={folder}"
        run(["-m", "runner", "-m", *TASK, *words, f"seed={seeds}", where], setting)
        yield Row(what, Spread.of(_between(folder, runs)), limit, "s")


def _between(folder: Path, runs: int) -> Iterator[float]:
    """Yield, for each run but the first, the seconds since the run before it, less its steps."""
    before: datetime | None = None
    for number in range(runs):
        own = folder / str(number)
        ended = datetime.fromisoformat(read_object(own / files.STATUS)["ended"])
        if before is not None:
            steps = sum(float(row[keys.TIME_STEP]) for row in read_rows(own / files.ROWS))
            yield (ended - before).total_seconds() - steps
        before = ended
