"""Models with gradients that can be restored, and the clock of their device.

Gradients are random and made once, so that no forward or backward pass is needed. A step, or
clipping, changes them; they are restored outside of the measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.bench.pairs import Side, clocked
from runner.bench.table import Setting
from runner.clip import Decision, Layout, build
from runner.models.gpt import GPT
from runner.run_folder.rows import JsonlSink
from runner.telemetry.meter import Meter
from runner.telemetry.step import StepMetrics

SCALE = 1e-3
"""Standard deviation of the elements of gradients."""

SHORT = 0.02
"""Seconds below which work is done three times."""


class Subject:
    """A model on a device whose parameters have gradients, with its name in tables."""

    def __init__(self, name: str, model: nn.Module, device: str) -> None:
        torch.manual_seed(0)
        self.name, self.model, self.device = name, model.to(device), device
        self.parameters = list(self.model.parameters())
        self._saved = [torch.randn_like(each).mul_(SCALE) for each in self.parameters]
        for parameter, gradient in zip(self.parameters, self._saved, strict=True):
            parameter.grad = gradient.clone()

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients, in the order of the parameters."""
        return [p.grad for p in self.parameters if p.grad is not None]

    @property
    def norm(self) -> float:
        """Norm of the saved gradients, summed in float64."""
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in self._saved]
        return float(torch.stack(norms).norm())

    def restore(self) -> None:
        """Restore the gradients."""
        torch._foreach_copy_(self.gradients, self._saved)

    def side(self, work: Callable[[], object]) -> Side:
        """Return a side that restores the gradients and times ``work``."""
        clock = clock_of(self.device)

        def once() -> float:
            self.restore()
            return clock(work)

        def timed() -> float:
            seconds = once()
            return seconds if seconds > SHORT else min(seconds, once(), once())

        return timed


def clock_of(device: str) -> Callable[[Callable[[], object]], float]:
    """Return a function that times work on ``device``: by its events on a GPU."""
    if device == "cpu":
        return clocked

    def on_gpu(work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return on_gpu


class Small(nn.Module):
    """As many small tensors as ``number``, of ``size`` elements each."""

    def __init__(self, number: int, size: int = 64) -> None:
        super().__init__()
        self.each = nn.ParameterList(torch.randn(size) for _ in range(number))


def of_torchvision(name: str, **options: Any) -> nn.Module:
    """Make a model of torchvision by its name."""
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)(**options)
    return model


def gpt(layers: int = 12, width: int = 384, heads: int = 6) -> nn.Module:
    """Make a decoder-only transformer over bytes."""
    return GPT(256, 128, layers, heads, width, tied=True, bias=True, dropout=0.0)


def subjects(setting: Setting) -> Iterator[Subject]:
    """Yield the models of the tables one after another; torch uses one thread meanwhile."""
    made: dict[str, Callable[[], nn.Module]] = {
        "resnet34": partial(of_torchvision, "resnet34"),
        "vit_b_16": partial(of_torchvision, "vit_b_16"),
        "gpt 12x384": gpt,
        "2,000 x 64": partial(Small, 2_000),
    }
    if setting.quick:
        made = {"gpt 2x96": partial(gpt, 2, 96), "200 x 64": partial(Small, 200)}
    with threads(1):
        for name, make in made.items():
            yield Subject(name, make(), setting.device)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Context in which torch uses ``number`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Telemetry:
    """The record of a training: every decision becomes a row of a file in ``folder``."""

    _numbers = count()

    def __init__(self, folder: Path) -> None:
        self._meter = Meter([JsonlSink(folder / f"rows-{next(self._numbers)}.jsonl")])
        self._steps = count(1)

    def __call__(self, decision: Decision) -> None:
        """Take the decision of a step."""
        step = next(self._steps)
        self._meter.push(StepMetrics(step, 0.0, decision, 0.1, step, 0, 0.001))


def clipping(subject: Subject, setting: Setting, name: str, **options: Any) -> Side:
    """Return a side that clips ``subject`` by the mode ``name`` and records its decisions."""
    mode, layout = build(name, **options), Layout.of_model(subject.model)
    mode.bind(layout)
    telemetry = Telemetry(setting.folder)
    return subject.side(torch.no_grad()(lambda: telemetry(mode.clip(layout))))
