"""What clipping costs on a GPU: times, bandwidth, waits of the host, a captured step, an epoch.

No other table needs a GPU. The first pieces run on any device, so that tests run them on a CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from runner.bench.clip import ADAPTIVE, BINDING, FREE, SCALE, Subject, small, telemetry
from runner.bench.timing import Row, Setting, Side, clocked, compared, interleave, row
from runner.booster import Booster
from runner.clip import build
from runner.models.gpt import GPT
from runner.run_folder.strict_json import JsonlSink
from runner.telemetry.sinks import Sink
from runner.train.options import GradientClipping, Log
from runner.train.trainer import Trainer

VOCABULARY = 256
THRESHOLD = 1.0  # of the norm, of trainings
STEPS = 100  # of an epoch
SYNCHRONIZES = "called a synchronizing CUDA operation"
"""Begins torch's warning where the host waits for the device."""


def rows(setting: Setting) -> Iterator[Row]:
    """Clipping on a GPU: absolute times, bandwidth, waits of the host, a captured step, an epoch.

    1.00 of a bandwidth is what copying a large tensor on the device reaches
    """
    bandwidth = copying(setting)
    yield row("copying a large tensor", [rate / 1e9 for rate in bandwidth], unit="GB/s")
    peak = max(bandwidth)
    models: dict[str, Callable[[], nn.Module]] = {
        "resnet34": torchvision.models.resnet34,
        "gpt 100 M": lambda: gpt(quick=False),
        "2,000 x 64": lambda: small(2_000),
    }
    if setting.quick:
        models = {"gpt": lambda: gpt(quick=True), "200 x 64": lambda: small(200)}
    with JsonlSink(setting.folder / "gpu.jsonl") as sink:
        for name, make in models.items():
            yield from clipping(Subject(name, make(), setting, sink), peak)
        yield waits(setting, sink)
        yield from epoch(setting, sink)
    yield captured(setting)


def gpt(quick: bool) -> GPT:
    """Return a GPT over bytes of about 100 million parameters; with ``quick`` a tiny one."""
    sizes: dict[str, Any] = {"context": 1024, "layers": 14, "heads": 12, "width": 768}
    if quick:
        sizes = {"context": 16, "layers": 2, "heads": 2, "width": 16}
    return GPT(VOCABULARY, tied=True, bias=True, dropout=0.0, **sizes)


def copying(setting: Setting) -> list[float]:
    """Return the bytes that the device reads and writes in a second, of several copies."""
    megabytes = 1 if setting.quick else 1024
    source = torch.ones(megabytes * 2**18, device=setting.device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    times = interleave(
        {"copy": lambda: clocked(lambda: target.copy_(source), setting.device)}, setting.pairs()
    )
    return [moved / seconds for seconds in times["copy"]]


def clipping(subject: Subject, peak: float) -> Iterator[Row]:
    """Measure clipping alone, in microseconds and as a share of the bandwidth ``peak``."""
    norm = subject.norm

    def torchs() -> None:
        nn.utils.clip_grad_norm_(subject.parameters, BINDING * norm, foreach=True)

    sides: dict[str, Side] = {
        "clip_grad_norm_": subject.side(torchs),
        "norm, binding": subject.clipping("norm", threshold=BINDING * norm),
        "norm, not binding": subject.clipping("norm", threshold=FREE * norm),
        "adaptive": subject.clipping("adaptive", threshold=ADAPTIVE["ours"], exclude=[]),
        "value": subject.clipping("value", threshold=SCALE),
    }
    times = interleave(sides, subject.setting.pairs(31))
    gradient_bytes = sum(p.numel() * p.element_size() for p in subject.parameters)
    # A norm reads the gradients; what changes them reads and writes them once more.
    moved = {
        "clip_grad_norm_": 3 * gradient_bytes,
        "norm, binding": 3 * gradient_bytes,
        "norm, not binding": gradient_bytes,
        "adaptive": 4 * gradient_bytes,
        "value": 2 * gradient_bytes,
    }
    for side, seconds in times.items():
        microseconds = [1e6 * duration for duration in seconds]
        yield row(f"{subject.name}, {side}", microseconds, unit="us")
        shares = [moved[side] / duration / peak for duration in seconds]
        yield row(f"{subject.name}, {side}, share of the bandwidth", shares)
    what = f"{subject.name}, norm, binding over clip_grad_norm_"
    yield compared(what, times, "norm, binding", "clip_grad_norm_", limit=1.0)


class Training:
    """A GPT on random tokens: the batch, the network, and its fused AdamW."""

    def __init__(self, setting: Setting, capturable: bool = False) -> None:
        torch.manual_seed(0)
        self.device = setting.device
        self.model = gpt(setting.quick).to(self.device)
        samples = 2 if setting.quick else 8
        shape = (samples, self.model.context + 1)
        self.tokens = torch.randint(VOCABULARY, shape, device=self.device)
        parameters = self.model.parameters()
        self.optimizer: Optimizer = torch.optim.AdamW(
            parameters, lr=1e-4, fused=True, capturable=capturable
        )

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and the next ones, int64 [B, T]."""
        return self.tokens[:, :-1], self.tokens[:, 1:]

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean loss of the batch."""
        inputs, targets = self.batch
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def our_step(training: Training) -> Callable[[], Any]:
    """Return what takes a clipped step with this project and returns the decision."""
    model, optimizer, *_ = Booster().boost(training.model, training.optimizer)
    mode = build("norm", threshold=THRESHOLD)
    optimizer.bind(mode)

    def step() -> Any:
        optimizer.backward(training.loss(model))
        decision = optimizer.clip_and_step(mode)
        optimizer.zero_grad(set_to_none=False)
        return decision

    return step


def torchs_step(training: Training) -> Callable[[], Any]:
    """Return what takes the same step with torch alone."""
    parameters = list(training.model.parameters())

    def step() -> Tensor:
        training.loss(training.model).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(parameters, THRESHOLD, foreach=True)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)
        return norm

    return step


def waits(setting: Setting, sink: Sink) -> Row:
    """Count how often the host waits for the device in a clipped step with its record."""
    step = our_step(Training(setting))
    push = telemetry(sink)
    for _ in range(3):
        push(step())
    numbers = []
    for _ in range(setting.pairs(5)):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                push(step())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        numbers.append(sum(SYNCHRONIZES in str(warning.message) for warning in caught))
    return row("waits of the host in a clipped step with its record", numbers, 0, unit="")


def epoch(setting: Setting, sink: Sink) -> Iterator[Row]:
    """Measure an epoch of a Trainer with its record against the same steps in plain PyTorch."""
    steps = 3 if setting.quick else STEPS

    def bare() -> float:
        training = Training(setting)
        step = torchs_step(training)

        def work() -> None:
            for _ in range(steps):
                step()

        return clocked(work, setting.device)

    def trained() -> float:
        training = Training(setting)
        trainer = Trainer(
            training.model,
            [training.batch] * steps,
            f"{steps}ba",
            optimizers=training.optimizer,
            booster=Booster("bf16"),
            log=Log([sink], interval=10, bar=False),
            algorithms=[GradientClipping("norm", THRESHOLD)],
        )
        return clocked(trainer.fit, setting.device)

    times = interleave({"bare": bare, "ours": trained}, setting.pairs(3))
    inputs, _ = Training(setting).batch
    rates = [steps * inputs.numel() / seconds / 1e3 for seconds in times["ours"]]
    yield row(f"an epoch of {steps} steps of the GPT, bf16, thousand tokens", rates, unit="/s")
    yield compared("the same epoch over a bare loop", times, "ours", "bare", 1.01, steps=steps)


def captured(setting: Setting) -> Row:
    """Measure a step that is replayed from a CUDA graph against the same step from Python."""
    step = our_step(Training(setting, capturable=True))
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decision = step()
    graph.replay()
    norms = [float(decision.norm)]
    graph.replay()
    norms.append(float(decision.norm))
    if norms[0] == norms[1]:
        raise RuntimeError(f"a captured step measured the norm {norms[0]} twice: nothing moved")
    from_python = our_step(Training(setting, capturable=True))
    from_python()
    sides: dict[str, Side] = {
        "python": lambda: clocked(from_python, setting.device),
        "graph": lambda: clocked(graph.replay, setting.device),
    }
    times = interleave(sides, setting.pairs())
    return compared("a clipped step in a CUDA graph", times, "graph", "python", limit=1.0)
