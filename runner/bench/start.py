"""How long the program takes until it answers, and how long a run takes besides its training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from runner.bench.commands import run, side
from runner.bench.pairs import Spread, clocked, interleave, milliseconds, ratio
from runner.bench.table import Row, Setting
from runner.run_folder import files, keys
from runner.run_folder.rows import read_rows

TITLE = (
    "commands in fresh processes\n"
    "1.00 is python -c 'import torch'; in s: what a run takes besides its training and that import"
)

ANSWERS: dict[str, tuple[list[str], int]] = {
    "--help": (["--help"], 0),
    "--cfg job": (["--cfg", "job"], 0),
    "--info": (["--info"], 0),
    "a wrong request": (["clip.treshold=1", "accumulation.steps=0"], 2),
    "plan": (["plan", "recipe=sweep_norm"], 0),
}
"""Arguments and exit code of each command."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table."""
    sides = {"import": side(["-c", "import torch"], setting)}
    answers = list(ANSWERS)[:1] if setting.quick else list(ANSWERS)
    for name in answers:
        arguments, code = ANSWERS[name]
        sides[name] = side(["-m", "runner", *arguments], setting, code)
    pairs = 1 if setting.quick and setting.rounds is None else setting.pairs()
    times = interleave(sides, pairs, warm_up=0 if setting.quick else 1)
    medians = milliseconds(times)
    for name in answers:
        shown = {"import": medians["import"], "ours": medians[name]}
        yield Row(f"python -m runner {name}", ratio(times[name], times["import"]), 0.45, ms=shown)
    yield _whole_run(setting)


def _whole_run(setting: Setting) -> Row:
    """Measure a run of one step, less that step, against the import of torch."""
    numbers = count()

    def outside() -> float:
        folder = setting.folder / f"run-{next(numbers)}"
        words = ["train.max_duration=1ba", f"hydra.run.dir={folder}"]
        seconds = clocked(lambda: run(["-m", "runner", *words], setting))
        steps = sum(float(row[keys.TIME_STEP]) for row in read_rows(folder / files.ROWS))
        return seconds - steps

    sides = {"import": side(["-c", "import torch"], setting), "run": outside}
    pairs = 1 if setting.quick and setting.rounds is None else setting.pairs(5)
    times = interleave(sides, pairs, warm_up=0 if setting.quick else 1)
    more = [one - other for one, other in zip(times["run"], times["import"], strict=True)]
    what = "a run of one step, beyond that step and import torch"
    return Row(what, Spread.of(more), 4.0, "s", milliseconds(times))
