"""How long the program takes until it answers, and how long a run takes besides its training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path

from runner.bench.pairs import Side, Spread, clocked, interleave
from runner.bench.table import Row, Setting, compared
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

PATIENCE = 300.0
"""Seconds after which a command is killed."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table."""
    bare: Side = partial(clocked, partial(run, ["-c", "import torch"], setting))
    sides = {"import": bare}
    answers = list(ANSWERS)[:1] if setting.quick else list(ANSWERS)
    for name in answers:
        arguments, code = ANSWERS[name]
        sides[name] = partial(clocked, partial(run, ["-m", "runner", *arguments], setting, code))
    quick = setting.quick and setting.rounds is None
    warm_up = 0 if setting.quick else 1
    times = interleave(sides, 1 if quick else setting.pairs(), warm_up)
    for name in answers:
        yield compared(f"python -m runner {name}", times, name, "import", 0.45)
    numbers = count()

    def outside() -> float:
        folder = setting.folder / f"run-{next(numbers)}"
        words = ["-m", "runner", "train.max_duration=1ba", f"hydra.run.dir={folder}"]
        seconds = clocked(lambda: run(words, setting))
        return seconds - sum(float(row[keys.TIME_STEP]) for row in read_rows(folder / files.ROWS))

    times = interleave({"import": bare, "run": outside}, 1 if quick else setting.pairs(5), warm_up)
    more = [one - other for one, other in zip(times["run"], times["import"], strict=True)]
    what = "a run of one step, beyond that step and import torch"
    yield Row(what, Spread.of(more), 4.0, "s")


def run(arguments: Sequence[str], setting: Setting, code: int = 0) -> None:
    """Run Python with ``arguments`` to its end, with its outputs in the folder of ``setting``."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    path = [str(Path(__file__).parents[2]), *filter(None, [kept.get("PYTHONPATH")])]
    kept |= {"PYTHONPATH": os.pathsep.join(path), "WANDB_MODE": "offline"}
    ended = subprocess.run(
        [sys.executable, *arguments],
        env=kept | {"RUNNER_OUTPUTS": str(setting.folder / "outputs")},
        cwd=setting.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        check=False,
    )
    if ended.returncode != code:
        printed = ended.stdout.decode(errors="replace")[-2000:]
        command = " ".join(["python", *arguments])
        raise RuntimeError(f"{command} ended with {ended.returncode}, not {code}:\n{printed}")
