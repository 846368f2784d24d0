"""Models with gradients that can be restored, and the clock of their device.

Gradients are random and made once, so that no forward or backward pass is needed. A step, or
clipping, changes them; they are restored outside of the measured time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.bench.pairs import Side, clocked
from runner.clip import Decision
from runner.models.gpt import GPT
from runner.run_folder.rows import JsonlSink
from runner.telemetry.meter import Meter
from runner.telemetry.step import StepMetrics

SCALE = 1e-3
"""Standard deviation of the elements of gradients."""

BLOCK = 2**20

SHORT = 0.02
"""Seconds below which work is done three times."""


class Subject:
    """A model whose parameters have gradients.

    Args:
        name: name in tables.
        model: the model.
        device: device that it moves to.

    Attributes:
        parameters: its parameters.
    """

    def __init__(self, name: str, model: nn.Module, device: str) -> None:
        torch.manual_seed(0)
        self.name, self.model, self.device = name, model.to(device), device
        self.parameters = list(self.model.parameters())
        self._saved = [torch.randn_like(each).mul_(SCALE) for each in self.parameters]
        self.give()

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients, in the order of the parameters."""
        return [p.grad for p in self.parameters if p.grad is not None]

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def norm(self) -> float:
        """Norm of the saved gradients, summed in float64."""
        return math.sqrt(sum(map(exact_power, self._saved)))

    def loss(self) -> Tensor:
        """Return a loss whose backward pass gives these gradients, for no other work."""
        loss: Tensor = _Given.apply(self._saved, *self.parameters)
        return loss

    def give(self) -> None:
        """Give every parameter a gradient of its own."""
        for parameter, gradient in zip(self.parameters, self._saved, strict=True):
            parameter.grad = gradient.clone()

    def restore(self) -> None:
        """Restore the gradients."""
        torch._foreach_copy_(self.gradients, self._saved)

    def side(self, work: Callable[[], object]) -> Side:
        """Return a side that restores the gradients and times ``work``.

        Short work is done three times and the fastest counts, which leaves out interruptions.
        """
        clock = clock_of(self.device)

        def once() -> float:
            self.restore()
            return clock(work)

        def timed() -> float:
            seconds = once()
            return seconds if seconds > SHORT else min(seconds, once(), once())

        return timed


class _Given(torch.autograd.Function):
    """Has given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        return None, *torch._foreach_mul(ctx.gradients, scale)


def exact_power(tensor: Tensor) -> float:
    """Return Σx² in float64, by blocks, so that no copy of the whole tensor is made."""
    blocks = torch.split(tensor.reshape(-1), BLOCK)
    return math.fsum(torch.dot(wide, wide).item() for wide in map(Tensor.double, blocks))


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
    """Many small tensors.

    Args:
        number: number of parameters.
        size: elements of each.
    """

    def __init__(self, number: int, size: int = 64) -> None:
        super().__init__()
        self.each = nn.ParameterList(torch.randn(size) for _ in range(number))


def resnet34() -> nn.Module:
    """Make torchvision's ResNet-34 for 1,000 classes."""
    from torchvision.models import resnet34 as made

    model: nn.Module = made()
    return model


def vit_b_16() -> nn.Module:
    """Make torchvision's ViT-B/16 for 1,000 classes."""
    from torchvision.models import vit_b_16 as made

    model: nn.Module = made()
    return model


def gpt(layers: int = 12, width: int = 384) -> nn.Module:
    """Make a decoder-only transformer over bytes."""
    return GPT(256, 128, layers, 6, width, tied=True, bias=True, dropout=0.0)


def subjects(device: str, quick: bool) -> Iterator[Subject]:
    """Yield the models of the tables one after another, so that one is in memory at a time."""
    made: dict[str, Callable[[], nn.Module]]
    if quick:
        made = {"gpt 2x96": lambda: gpt(2, 96), "200 x 64": lambda: Small(200)}
    else:
        made = {
            "resnet34": resnet34,
            "vit_b_16": vit_b_16,
            "gpt 12x384": gpt,
            "2,000 x 64": lambda: Small(2_000),
        }
    for name, make in made.items():
        yield Subject(name, make(), device)


class Telemetry:
    """The record of a training: every decision becomes a row of a file, as in a run.

    Args:
        folder: folder of the file.
    """

    _numbers = count()

    def __init__(self, folder: Path) -> None:
        self._sink = JsonlSink(folder / f"rows-{next(self._numbers)}.jsonl")
        self._meter = Meter([self._sink])
        self._step = 0

    def __call__(self, decision: Decision) -> None:
        """Take the decision of a step."""
        self._step += 1
        self._meter.push(StepMetrics(self._step, 0.0, decision, 0.1, self._step, 0, 0.001))


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Context in which torch uses ``number`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_numbers(device: str) -> dict[int, str]:
    """Return the numbers of threads to measure, one and two if there are cores, with names."""
    if device != "cpu":
        return {torch.get_num_threads(): "GPU"}
    both = {1: "1 thread", 2: "2 threads"}
    return both if (os.cpu_count() or 1) > 1 else {1: both[1]}
