"""How long the program takes until it answers, and how long a run takes besides its training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

from runner.bench.timing import Row, Setting, Side, Spread, clocked, compared, interleave
from runner.run_folder import files, keys
from runner.run_folder.strict_json import read_rows

TITLE = (
    "commands in fresh processes\n"
    "1.00 is python -c 'import torch'; in s: what a run takes besides its training and that import"
)

ANSWERS = {"--help": 0, "--cfg job": 0, "clip.treshold=1 accumulation.steps=0": 2, "plan": 0}
"""Arguments, and the exit code of each command."""


def rows(setting: Setting) -> Iterator[Row]:
    sides: dict[str, Side] = {"import": partial(clocked, partial(_run, setting, "-c import torch"))}
    answers = list(ANSWERS)[: 1 if setting.quick else None]
    for words in answers:
        command = partial(_run, setting, f"-m runner {words}", ANSWERS[words])
        sides[words] = partial(clocked, command)
    numbers = count()

    def outside() -> float:
        folder = setting.folder / f"run-{next(numbers)}"
        words = f"-m runner train.max_duration=1ba hydra.run.dir={folder}"
        seconds = clocked(lambda: _run(setting, words))
        return seconds - sum(float(row[keys.TIME_STEP]) for row in read_rows(folder / files.ROWS))

    sides["run"] = outside
    times = interleave(sides, 1 if setting.quick else setting.pairs(7), 0 if setting.quick else 1)
    for words in answers:
        yield compared(f"python -m runner {words}", times, words, "import", 0.45)
    more = [one - other for one, other in zip(times["run"], times["import"], strict=True)]
    what = "a run of one step, beyond that step and import torch"
    yield Row(what, Spread.of(more), 4.0, "s")


def _run(setting: Setting, words: str, code: int = 0) -> None:
    arguments = words.split(" ", 1) if words.startswith("-c") else words.split()
    outputs = {"WANDB_MODE": "offline", "RUNNER_OUTPUTS": str(setting.folder / "outputs")}
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **outputs, **root},
        cwd=setting.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    if ended.returncode != code:
        printed = ended.stdout.decode(errors="replace")[-2000:]
        raise RuntimeError(f"python {words} ended with {ended.returncode}, not {code}:\n{printed}")
