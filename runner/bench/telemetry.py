"""What each optional measurement adds to a training step, with a row and a transfer at every step.

A step is that of a whole training: forward and backward passes, clipping, the optimizer, the
record. Trainings alternate in one process. Times are those of the CPU, which other programs on the
machine change less than those of a clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runner.bench.loop import QUICK, Task, resnet18, trained
from runner.bench.pairs import Side, interleave, milliseconds, ratio
from runner.bench.subjects import gpt, threads
from runner.bench.table import Row, Setting
from runner.clip import build
from runner.data.dataset import TensorPairs
from runner.run_folder.rows import JsonlSink
from runner.telemetry.options import Measurements

TITLE = (
    "CPU time of training steps with optional measurements, one thread, a row at every step\n"
    "1.00 is the same step without the measurement"
)

PER_LAYER = 1.10
"""Largest ratio that logging layer norms may have."""


@dataclass(frozen=True)
class Text(Task):
    """A language model over random tokens."""

    def data(self) -> TensorPairs:
        """Draw the samples."""
        samples = self.steps * self.batch
        inputs, targets = torch.randint(256, (2, samples, *self.shape))
        return TensorPairs(inputs, targets)


TASKS = (
    Task("resnet18", resnet18, (3, 32, 32), 32, 2),
    Text("gpt 12x384", gpt, (128,), 2, 2),
)
SMALL = (replace(QUICK, steps=10),)

NORM, VALUE = ("norm", 0.25), ("value", 1e-3)

COMPARED: Mapping[str, tuple[tuple[str, float], int, Mapping[str, Mapping[str, Any]]]] = {
    "": (
        NORM,
        1,
        {
            "per_layer": {"per_layer": True},
            "per_layer, worst_layers=5": {
                "per_layer": True,
                "measurements": Measurements(worst_layers=5),
            },
            "update_ratio": {"measurements": Measurements(update_ratio=True)},
            "spike_score": {"measurements": Measurements(spike_score=True)},
            "clip_cosine": {"measurements": Measurements(clip_cosine=True)},
        },
    ),
    ", clip=value": (VALUE, 1, {"clip_cosine": {"measurements": Measurements(clip_cosine=True)}}),
    ", 2 microbatches": (
        NORM,
        2,
        {"noise_scale": {"measurements": Measurements(noise_scale=True)}},
    ),
}
"""Clipping and microbatches of each group of trainings, and what is measured besides none."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; one row for each model and measurement."""
    logging.disable(logging.WARNING)  # each training would say that it has batch norm
    try:
        for task in SMALL if setting.quick else TASKS:
            for number, (what, group) in enumerate(COMPARED.items()):
                with threads(1):
                    yield from _group(task, what, *group, setting, f"{task.name}-{number}")
    finally:
        logging.disable(logging.NOTSET)


def _group(
    task: Task,
    what: str,
    clip: tuple[str, float],
    microbatches: int,
    measured: Mapping[str, Mapping[str, Any]],
    setting: Setting,
    file: str,
) -> Iterator[Row]:
    """Measure trainings that differ in what they measure alone."""
    whole = replace(task, batch=task.batch // microbatches, steps=task.steps * microbatches)
    sinks = [JsonlSink(_file(setting.folder, file, number)) for number in range(len(measured) + 1)]

    def side(sink: JsonlSink, options: Mapping[str, Any]) -> Side:
        return lambda: trained(
            whole,
            [sink],
            1,
            algorithms=[build(clip[0], threshold=clip[1])],
            clock=time.process_time,
            criterion=None,
            accumulation_steps=microbatches,
            log_flush=1,
            **options,
        )

    every = {"plain": {}, **measured}
    sides = {
        name: side(sink, options)
        for sink, (name, options) in zip(sinks, every.items(), strict=True)
    }
    try:
        times = interleave(sides, setting.pairs())
    finally:
        for sink in sinks:
            sink.__exit__(None)
    medians = {name: ms / task.steps for name, ms in milliseconds(times).items()}
    for name in measured:
        limit = PER_LAYER if name == "per_layer" else None
        shown = {"plain": medians["plain"], "measured": medians[name]}
        spread = ratio(times[name], times["plain"])
        yield Row(f"{task.name}{what}, {name}", spread, limit, ms=shown)


def _file(folder: Path, name: str, number: int) -> Path:
    return folder / f"telemetry-{name}-{number}.jsonl".replace(" ", "-")
