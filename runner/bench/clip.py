"""What clipping adds to an optimizer step.

Gradients are random and made once, so that no forward or backward pass is needed. A step, or
clipping, changes them; they are restored outside of the measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from typing import Any

import torch
import torchvision
from torch import nn
from torch.optim import Optimizer

from runner.bench.timing import Row, Setting, Side, clocked, compared, interleave
from runner.booster import Booster
from runner.clip import Decision, build
from runner.gradients import Layout
from runner.models.gpt import GPT
from runner.run_folder import keys
from runner.run_folder.strict_json import JsonlSink
from runner.telemetry.meter import Meter
from runner.telemetry.sinks import Sink
from runner.telemetry.step import Numbers, StepMetrics

# Thresholds of ``norm``, as multiples of the norm.
BINDING = 0.5
FREE = 2.0
SCALE = 1e-3  # standard deviation of the elements of gradients
# Thresholds of ``adaptive``: below the ratio of almost every unit, and above all; of ``value``, by
# the share of normally distributed elements that they clip.
ADAPTIVE = {"ours": 1e-3, "nothing clipped": 1e3}
VALUE = {"10 % clipped": 1.645 * SCALE, "nothing clipped": 1e3}

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd+momentum": lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
}


class Subject:
    """A model on a device whose parameters have gradients, with its name in tables."""

    def __init__(self, name: str, model: nn.Module, setting: Setting, sink: Sink) -> None:
        torch.manual_seed(0)
        self.name = name
        self.setting = setting
        self.sink = sink  # of the rows of its steps
        self.model = model.to(setting.device)
        self.parameters = list(self.model.parameters())
        self._saved = [torch.randn_like(parameter).mul_(SCALE) for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, self._saved, strict=True):
            parameter.grad = gradient.clone()
        self.norm = float(nn.utils.get_total_norm(self._saved))
        self.small = isinstance(model, nn.ParameterList)  # of many tensors

    def side(self, work: Callable[[], object]) -> Side:
        """Return a side that restores the gradients and times ``work``."""

        def timed() -> float:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_copy_(gradients, self._saved)
            return clocked(work, self.setting.device)

        return timed

    def clipping(self, name: str, **options: Any) -> Side:
        mode = build(name, **options)
        layout = Layout.of_model(self.model)
        mode.bind(layout)
        push = telemetry(self.sink)
        return self.side(torch.no_grad()(lambda: push(mode.clip(layout))))


def telemetry(sink: Sink) -> Callable[[Decision], None]:
    """Return the record of a training: every decision becomes a row of ``sink``."""
    meter = Meter([sink])
    steps = count(1)

    def push(decision: Decision) -> None:
        step = next(steps)
        numbers: Numbers = {
            keys.LOCAL_LOSS: 0.0,
            keys.TRAIN_LR: 0.1,
            keys.TRAIN_SAMPLES: step,
            keys.TIME_STEP: 0.001,
        }
        meter.push(StepMetrics(step, decision, numbers))

    return push


def small(number: int) -> nn.Module:
    """Return a model of ``number`` tensors of 64 elements."""
    return nn.ParameterList(torch.randn(64) for _ in range(number))


def gpt(layers: int = 12, width: int = 384, heads: int = 6) -> nn.Module:
    """Return a GPT over bytes, with a context of 128, tied weights and biases."""
    return GPT(256, 128, layers, heads, width, tied=True, bias=True, dropout=0.0)


def rows(setting: Setting) -> Iterator[Row]:
    """Time that clipping and telemetry add to a fused optimizer step, one thread.

    1.00 is what torch.nn.utils.clip_grad_norm_(foreach=True) adds, unless a row says otherwise
    """
    models: dict[str, Callable[[], nn.Module]] = {
        "resnet34": torchvision.models.resnet34,
        "vit_b_16": torchvision.models.vit_b_16,
        "gpt 12x384": gpt,
        "2,000 x 64": lambda: small(2_000),
    }
    if setting.quick:
        models = {"gpt 2x96": lambda: gpt(2, 96), "200 x 64": lambda: small(200)}
    with JsonlSink(setting.folder / "clip.jsonl") as sink:
        for name, make in models.items():
            subject = Subject(name, make(), setting, sink)
            for optimizer, make_optimizer in OPTIMIZERS.items():
                yield from _steps(subject, optimizer, make_optimizer(subject.parameters))
            yield from _adaptive(subject)
            yield from _value(subject)


def _steps(subject: Subject, name: str, optimizer: Optimizer) -> Iterator[Row]:
    """Measure a threshold that binds and one that does not, against the same bare steps."""
    norm = subject.norm
    push = telemetry(subject.sink)
    _, wrapped, *_ = Booster().boost(subject.model, optimizer)

    def torchs() -> None:
        nn.utils.clip_grad_norm_(subject.parameters, BINDING * norm, foreach=True)
        optimizer.step()

    def ours(factor: float) -> Side:
        mode = build("norm", threshold=factor * norm)
        return subject.side(lambda: push(wrapped.clip_and_step(mode)))

    sides = {"step": subject.side(optimizer.step), "torch": subject.side(torchs)}
    sides |= {"binding": ours(BINDING), "not binding": ours(FREE)}
    times = interleave(sides, subject.setting.pairs())
    for binds, limit in (("binding", 0.50), ("not binding", 0.35)):
        what = f"{subject.name}, {name}, {binds}"
        yield compared(
            what, times, binds, "torch", limit=0.60 if subject.small else limit, bare="step"
        )


def _adaptive(subject: Subject) -> Iterator[Row]:
    """Measure against reading as many weights and gradients, and scaling these in place."""
    weights = torch.cat([p.detach().reshape(-1) for p in subject.parameters])
    gradients = torch.randn_like(weights)

    def limit() -> None:
        torch.dot(weights, weights)
        torch.dot(gradients, gradients)
        gradients.mul_(1.0)

    sides = {"limit": subject.side(limit)}
    for name, threshold in ADAPTIVE.items():
        sides[name] = subject.clipping("adaptive", threshold=threshold, exclude=[])
    if subject.setting.peers and find_spec("timm"):
        from timm.utils.agc import adaptive_clip_grad

        clip: Any = adaptive_clip_grad
        sides["timm"] = subject.side(lambda: clip(subject.parameters, ADAPTIVE["ours"], eps=1e-3))
    times = interleave(sides, subject.setting.pairs())
    for name in list(sides)[1:]:
        limit_of_ratio = 1.35 if name == "ours" and not subject.small else None
        what = f"{subject.name}, adaptive, {name} over the memory's limit"
        yield compared(what, times, name, "limit", limit_of_ratio)
    if "timm" in times:
        yield compared(f"{subject.name}, adaptive, ours over timm", times, "ours", "timm", 0.5)


def _clipping_by_value(subject: Subject, threshold: float) -> Side:
    return subject.side(
        lambda: nn.utils.clip_grad_value_(subject.parameters, threshold, foreach=True)
    )


def _value(subject: Subject) -> Iterator[Row]:
    """Measure against torch's clipping by value, which counts and measures nothing."""
    for share, threshold in VALUE.items():
        sides = {
            "torch": _clipping_by_value(subject, threshold),
            "ours": subject.clipping("value", threshold=threshold),
        }
        times = interleave(sides, subject.setting.pairs())
        what = f"{subject.name}, value, {share} over torch's"
        yield compared(what, times, "ours", "torch", 1.5)
