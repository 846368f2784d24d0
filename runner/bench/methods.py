"""What each clipping mode adds to an optimizer step, against clipping by the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from runner.bench.pairs import Side, interleave
from runner.bench.subjects import Subject, Telemetry, gpt, of_torchvision, threads
from runner.bench.table import Row, Setting, compared
from runner.booster import Booster
from runner.clip import ClipMode, build

TITLE = (
    "time that a clipping mode and its telemetry add to a fused step of AdamW, one thread\n"
    "1.00 is what clip=norm adds with a threshold that binds"
)

EARLIER = 40
"""Steps before the measured ones, with gradients of half the size: histories are then filled, and
limits that follow from them bind."""

LIMIT = 1.2


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; one row for each model and mode."""
    made: dict[str, Callable[[], nn.Module]] = {
        "resnet18": partial(of_torchvision, "resnet18", num_classes=10),
        "gpt 12x384": gpt,
    }
    if setting.quick:
        made = {"gpt 2x96": partial(gpt, 2, 96)}
    for name, make in made.items():
        with threads(1):
            yield from _rows(Subject(name, make(), setting.device), setting)


def _rows(subject: Subject, setting: Setting) -> Iterator[Row]:
    optimizer = torch.optim.AdamW(subject.parameters, lr=1e-4, fused=True)
    _, wrapped, *_ = Booster().boost(subject.model, optimizer)
    telemetry = Telemetry(setting.folder)

    def side(mode: ClipMode) -> Side:
        for _ in range(EARLIER):
            subject.restore()
            torch._foreach_mul_(subject.gradients, 0.5)
            wrapped.clip_and_step(mode)
        return subject.side(lambda: telemetry(wrapped.clip_and_step(mode)))

    sides = {"step": subject.side(optimizer.step)}
    for name, options in modes(subject.norm, len(subject.parameters)).items():
        sides[name] = side(build(name, **options))
    times = interleave(sides, setting.pairs())
    for name in list(sides)[2:]:
        yield compared(f"{subject.name}, {name}", times, name, "norm", LIMIT, bare="step")


def modes(norm: float, tensors: int) -> Mapping[str, Mapping[str, Any]]:
    """Return the options of each mode, ``norm`` first, so that it binds in the measured steps."""
    half = {"threshold": norm / 2}
    return {
        "norm": half,
        "schedule": {**half, "warmup_steps": 0},
        "percentile": {"threshold": 50.0},
        "zscore": {"threshold": 2.5},
        "per_parameter": {"threshold": norm / tensors**0.5},
        "adagc": {"threshold": 1.05, "warmup_steps": EARLIER // 2},
        "chain": {"links": [{"mode": "norm", "threshold": norm}, {"mode": "norm", **half}]},
        "groups": {"groups": {"*.bias": {"mode": "norm", **half}, "*": {"mode": "norm", **half}}},
        "update": {"threshold": 1.0},
        "spike": {"threshold": 50.0, "min_steps": 0},
    }
