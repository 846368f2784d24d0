"""Kill a short run at random moments, continue it, and compare its end with an uninterrupted run.

    python -m tests.kills --count 100 --seed 1
    python -m tests.kills --count 20 --seed 2 plugin=ddp plugin.nproc=2

A third of the kills comes at any moment from the start of the process on, a third while the run
trains, and a third while a checkpoint is written. A run that comes to its end is compared, and
another one is begun, until so many kills were made; the last one is left to end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.kept import assert_alike

COMMAND = [
    *["-m", "runner", "device=cpu", "tracker=none", "data=text", "data.sequence_length=32"],
    *["data.max_bytes=60000", "data.batch_size=4", "accumulation=x2", "model=gpt"],
    *["model.context=32", "model.width=32", "model.dropout=0.1", "optimizer=adamw", "seed=3"],
    *["train.max_duration=60ba", "eval.interval=20ba", "checkpoint.interval=3ba"],
    *["checkpoint.keep_best=false", "log.flush=1"],
]
LONGEST = 150
"""Seconds that one process may take."""

KINDS = ("any moment", "training", "writing a checkpoint")


class Killer:
    """Runs the command again and again, and kills it.

    Args:
        home: folder for all runs.
        words: further overrides.
        draw: chooses the moments.
    """

    def __init__(self, home: Path, words: list[str], draw: random.Random) -> None:
        self.home, self.words, self.draw = home, words, draw
        self.whole = home / "whole"
        self.kills: Counter[str] = Counter()
        self.ended = 0
        began = time.monotonic()
        self.finish(self.whole)
        self.seconds = time.monotonic() - began

    def start(self, run: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *COMMAND, *self.words, f"hydra.run.dir={run}"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, run: Path) -> None:
        """Let a run come to its end."""
        if has_ended(run):
            return
        said, _ = (started := self.start(run)).communicate(timeout=LONGEST)
        assert started.returncode == 0, said
        assert "Traceback" not in said, said

    def kill(self, run: Path) -> bool:
        """Start a run and kill it; return False if it came to its end before."""
        if has_ended(run):
            return False
        kind = KINDS[sum(self.kills.values()) % len(KINDS)]
        rows, checkpoints = run / "metrics.jsonl", run / "checkpoints"
        before = rows.stat().st_mtime_ns if rows.exists() else 0
        started = self.start(run)
        deadline = time.monotonic() + LONGEST

        def trains() -> bool:
            # A run that continues first cuts its rows: it then trains when one is added.
            return rows.exists() and rows.stat().st_size > 0 and rows.stat().st_mtime_ns != before

        def writes() -> bool:
            return trains() and any(checkpoints.glob(".step_*"))

        waits = {"any moment": lambda: True, "training": trains, "writing a checkpoint": writes}
        while not waits[kind]() and started.poll() is None:
            assert time.monotonic() < deadline, kind
            time.sleep(0.0005 if kind == KINDS[2] else 0.01)
        longest = {"any moment": self.seconds, "training": 0.5, "writing a checkpoint": 0.01}
        time.sleep(self.draw.uniform(0, longest[kind]))
        started.kill()
        said, _ = started.communicate(timeout=120)
        assert "Traceback" not in said, said
        if started.returncode == 0:
            return False
        assert started.returncode == -9, said
        self.kills[kind] += 1
        return True

    def compare(self, run: Path) -> None:
        assert_alike(run, self.whole)
        self.ended += 1
        shutil.rmtree(run)

    def go(self, count: int) -> None:
        """Kill ``count`` times, and compare each run that comes to its end."""
        number = 0
        while sum(self.kills.values()) < count:
            run = self.home / str(number)
            if not self.kill(run):
                self.compare(run)
                number += 1
        run = self.home / str(number)
        self.finish(run)
        self.compare(run)


def has_ended(run: Path) -> bool:
    """Return whether a run finished, though its process may have been killed after that."""
    status = run / "status.json"
    return status.exists() and json.loads(status.read_text())["state"] == "finished"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as home:
        killer = Killer(Path(home), words, random.Random(args.seed))
        killer.go(args.count)
    kinds = ", ".join(f"{count} at {kind}" for kind, count in killer.kills.items())
    total = sum(killer.kills.values())
    print(f"{total} kills with seed {args.seed} ({kinds}): {killer.ended} runs ended, each equal")


if __name__ == "__main__":
    main()
