"""Train many steps with wandb offline, and watch memory and open files of all processes.

    python -m tests.long_run --steps 20000
    python -m tests.long_run --steps 20000 plugin=ddp plugin.nproc=2

Linux only. Counted is memory that no file backs: the heap, stacks and shared memory, but not the
code of libraries. Pages that several processes share are divided among them (PSS), so that the sum
counts each page once. The medians of two tenths of the run are compared, the one after the warm-up
and the last one. The exit code is 1 if the memory grew by 5 % or more, or if the number of open
files is another one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.process import ROOT

COMMAND = [
    *["-m", "runner", "device=cpu", "tracker.mode=offline", "model.width=4", "data.batch_size=16"],
    *["scheduler=constant", "optimizer=adamw", "eval.interval=500ba", "checkpoint.interval=1000ba"],
]
SAMPLES = 100
"""Times that the processes are looked at."""

LIMIT = 0.05
"""Growth of the memory that is too much."""

KINDS = {
    "wandb_process.py": "wandb recorder",
    "wandb-core": "wandb client",
    "resource_tracker": "resource tracker",
    "forkserver": "ranks and their fork server",
    "-m runner": "command",
}
"""What the command line of a process holds, and what is printed for it."""


@dataclass(frozen=True)
class Sample:
    """All processes of a run at one moment.

    Attributes:
        step: step of its last row.
        memory: bytes by kind of process.
        files: number of open files by kind of process.
    """

    step: int
    memory: Counter[str]
    files: Counter[str]


@dataclass(frozen=True)
class Growth:
    """What a run takes after its warm-up and at its end.

    Attributes:
        memory: bytes of each kind of process, at both times.
        files: number of open files of each kind of process, at both times.
    """

    memory: dict[str, tuple[float, float]]
    files: dict[str, tuple[float, float]]

    @property
    def share(self) -> float:
        """Growth of the memory of all processes, as a share of that after the warm-up."""
        before, after = (sum(pair[at] for pair in self.memory.values()) for at in (0, 1))
        return after / before - 1

    @property
    def problems(self) -> list[str]:
        """What grew."""
        said = [] if self.share < LIMIT else [f"memory grew by {self.share:.1%}"]
        return said + [
            f"open files of {kind}: {before:g}, then {after:g}"
            for kind, (before, after) in self.files.items()
            if before != after
        ]

    def __str__(self) -> str:
        lines = [f"{'':<30}{'MB':>8}{'MB':>8}{'files':>8}{'files':>8}"]
        for kind, pair in self.memory.items():
            numbers = (*(size / 1e6 for size in pair), *self.files[kind])
            lines.append(f"{kind:<30}" + "".join(f"{number:8.0f}" for number in numbers))
        return "\n".join([*lines, f"memory of all: {self.share:+.2%}"])


def watched(run: Path, steps: int, words: list[str], timeout: float) -> list[Sample]:
    """Train a run of ``steps`` steps to its end, and return what its processes took meanwhile."""
    command = [*COMMAND, *words, f"train.max_duration={steps}ba", f"hydra.run.dir={run}"]
    said = run.with_name("output.txt")
    with said.open("w") as output:
        started = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    samples: list[Sample] = []
    until = time.monotonic() + timeout
    try:
        while started.poll() is None:
            assert time.monotonic() < until, said.read_text()
            step = last_step(run / "metrics.jsonl")
            if step > len(samples) * steps / SAMPLES and step < steps:
                samples.append(sample(step, started.pid))
            time.sleep(0.05)
    finally:
        started.kill()
        started.wait()
    assert started.returncode == 0, said.read_text()
    return samples


def sample(step: int, pid: int) -> Sample:
    """Look at a process and all that it started."""
    taken = Sample(step, Counter(), Counter())
    for each in tree(pid):
        with suppress(OSError):  # it has just ended
            folder = Path(f"/proc/{each}")
            command = folder.joinpath("cmdline").read_text().replace("\0", " ")
            kind = next((kind for part, kind in KINDS.items() if part in command), command[:29])
            for line in folder.joinpath("smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    taken.memory[kind] += int(line.split()[1]) * 1024
            taken.files[kind] += len(list(folder.joinpath("fd").iterdir()))
    return taken


def last_step(rows: Path) -> int:
    """Return the step of the last row that is complete, 0 if there is none."""
    try:
        with rows.open("rb") as file:
            file.seek(-min(4096, file.seek(0, os.SEEK_END)), os.SEEK_END)
            *_, last, _ = file.read().split(b"\n")
            step: int = json.loads(last)["train/step"]
    except (OSError, ValueError):
        return 0
    return step


def tree(pid: int) -> Iterator[int]:
    """Yield the number of a process, and of all processes below it."""
    parents: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        with suppress(OSError, ValueError):
            # The name in parentheses may hold anything; the state and the parent follow.
            parent = int(Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return iter(found)


def growth(samples: list[Sample], steps: int, warm_up: int) -> Growth:
    """Compare the tenth of a run after its warm-up with its last tenth, by the median of each."""
    tenth = steps / 10
    first = [one for one in samples if warm_up <= one.step < warm_up + tenth]
    last = [one for one in samples if one.step >= steps - tenth]
    assert min(len(first), len(last)) >= 3, [one.step for one in samples]
    pair = (first, last)
    return Growth(
        {k: _medians([[s.memory[k] for s in part] for part in pair]) for k in last[-1].memory},
        {k: _medians([[s.files[k] for s in part] for part in pair]) for k in last[-1].memory},
    )


def _medians(parts: list[list[int]]) -> tuple[float, float]:
    before, after = (median(part) for part in parts)
    return before, after


def main() -> int:
    """Print what a run takes after its warm-up and at its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    args, words = parser.parse_known_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        samples = watched(Path(home, "run"), args.steps, words, timeout=0.1 * args.steps + 300)
    found = growth(samples, args.steps, warm_up=args.steps // 10)
    print(f"{args.steps} steps in {time.monotonic() - began:.0f} s, after a tenth and at the end")
    print(found)
    for problem in found.problems:
        print(problem)
    return bool(found.problems)


if __name__ == "__main__":
    sys.exit(main())
