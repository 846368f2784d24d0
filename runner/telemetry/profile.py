"""Where the time of some steps goes, by torch's profiler: a trace, and a table of parts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from runner.config.notation import plural
from runner.run_folder import files

PARTS = ("data", "forward", "backward", "clipping", "optimizer", "record")
"""Parts of a step. Clipping includes the wait until gradients are averaged over ranks."""
COMMUNICATION = ("gloo:", "nccl:", "c10d::")
"""How the profiler names operations that send something to other ranks."""


class Profile:
    """Profiles the optimizer steps from ``first`` to ``last`` on one rank.

    Args:
        first: number of the first step.
        last: number of the last step.
        folder: folder for ``trace.json``, which Perfetto reads, and the table ``steps.txt``.
    """

    def __init__(self, first: int, last: int, folder: Path) -> None:
        self.first = first
        self.last = last
        self.folder = folder
        self._profiler: profile | None = None
        self._steps = 0

    def region(self, part: str) -> AbstractContextManager[Any]:
        """Return a context that counts as ``part`` in the table, while steps are profiled."""
        return nullcontext() if self._profiler is None else record_function(f"step: {part}")

    def begin_step(self, step: int) -> None:
        """Begin to profile, if the step is one of those asked for."""
        if self._profiler is None and self._steps == 0 and self.first <= step <= self.last:
            self._profiler = profile(activities=_activities())
            self._profiler.start()

    def end_step(self, step: int) -> None:
        """Count a step, and write the files after the last one."""
        if self._profiler is not None:
            self._steps += 1
            if step >= self.last:
                self.close()

    def close(self) -> None:
        """End the profile, if one runs, and write its files."""
        profiler = self._profiler
        self._profiler = None
        if profiler is None:
            return
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / files.TRACE))
        text = "\n".join(_table(profiler.key_averages(), self._steps))
        (self.folder / files.STEPS).write_text(text + "\n", encoding="utf-8")


_WITHOUT_EFFECT = nullcontext()


class NoProfile:
    """Stands in for a :class:`Profile` where no step is profiled."""

    def region(self, part: str) -> AbstractContextManager[Any]:
        """Return a context without effect."""
        return _WITHOUT_EFFECT

    def begin_step(self, step: int) -> None:
        """Do nothing."""

    def end_step(self, step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _activities() -> list[ProfilerActivity]:
    import torch

    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *gpu]


def _table(events: Iterable[Any], steps: int) -> Iterable[str]:
    """Yield the lines of the table: milliseconds of a step in each part, and its share."""
    steps = max(steps, 1)
    milliseconds = dict.fromkeys(PARTS, 0.0)
    communication = 0.0
    for event in events:
        # Microseconds: of the host, or of the kernels that the part has started.
        total = max(event.cpu_time_total, event.device_time_total) / 1000 / steps
        part = event.key.removeprefix("step: ")
        if event.key.startswith("step: "):
            milliseconds[part] += total
        elif event.key.startswith(COMMUNICATION):
            communication += total
    whole = sum(milliseconds.values()) or 1.0
    yield f"mean of {plural(steps, 'step')}, with the profiler's own cost"
    for part, value in milliseconds.items():
        yield f"{part:14} {value:10.3f} ms  {value / whole:6.1%}"
    yield f"{'all parts':14} {whole:10.3f} ms"
    yield f"communication  {communication:10.3f} ms, also while other parts run"
