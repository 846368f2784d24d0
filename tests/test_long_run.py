"""A run does not take more and more memory or open files.

    python -m pytest -m slow tests/test_long_run.py

Counted is memory that no file backs: the heap, stacks and shared memory, but not the code of
libraries. Pages that several processes share are divided among them (PSS).
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import pytest

from tests.launch.ends import children, rows_of

STEPS = 1500
COMMAND = [
    *["-m", "runner", "device=cpu", "tracker.mode=offline", "model.width=4", "data.batch_size=16"],
    *["scheduler=constant", "optimizer=adamw", "eval.interval=50ba", "checkpoint.interval=50ba"],
    *["log.flush=5", f"train.max_duration={STEPS}ba"],
]


def tree(pid: int) -> list[int]:
    """A process, and all processes below it."""
    return [pid, *(below for child in children(pid) for below in tree(child))]


def sample(pid: int) -> tuple[int, int]:
    """Bytes and open files of a process and all that it started."""
    memory, files = 0, 0
    for each in tree(pid):
        with suppress(OSError):  # it has just ended
            folder = Path(f"/proc/{each}")
            for line in folder.joinpath("smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    memory += int(line.split()[1]) * 1024
            files += len(list(folder.joinpath("fd").iterdir()))
    return memory, files


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("plugin", [[], ["plugin=ddp", "plugin.nproc=2"]], ids=["single", "ddp"])
def test_memory_and_open_files_stay(environment, tmp_path, plugin):
    """The medians of the tenth after the warm-up, which is half of the run, and of the last one."""
    command = [sys.executable, *COMMAND, *plugin, f"hydra.run.dir={tmp_path / 'run'}"]
    samples: list[tuple[int, tuple[int, int]]] = []
    with (tmp_path / "printed").open("w") as printed:
        run = subprocess.Popen(command, env=environment, stdout=printed, stderr=printed)
    try:
        while run.poll() is None:
            with suppress(OSError):
                samples.append((len(rows_of(tmp_path / "run")), sample(run.pid)))
            time.sleep(0.05)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, (tmp_path / "printed").read_text()
    first = [taken for step, taken in samples if 0.5 * STEPS <= step < 0.6 * STEPS]
    last = [taken for step, taken in samples if 0.9 * STEPS <= step < STEPS]
    assert min(len(first), len(last)) >= 3
    (memory, files), (more, opened) = (
        map(median, zip(*part, strict=True)) for part in (first, last)
    )
    assert more < memory * 1.05
    assert files == opened
