"""What clipping by the norm adds to an optimizer step, and the norm alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.bench.pairs import Side, Spread, interleave
from runner.bench.subjects import Small, Subject, Telemetry, clock_of, subjects, threads
from runner.bench.table import Row, Setting, compared
from runner.booster import Booster
from runner.clip import Layout, build, total_norm

TITLE = (
    "time that clipping and telemetry add to a fused optimizer step, one thread\n"
    "1.00 is what torch.nn.utils.clip_grad_norm_(foreach=True) adds, unless a row says otherwise"
)

BINDING, FREE = 0.5, 2.0
"""Thresholds, as multiples of the norm."""

ZEROS = 30_000_000
ACCURATE = 100_000_000
"""Elements of the tensors that the norm alone is measured on."""

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd+momentum": partial(torch.optim.SGD, lr=1e-4, momentum=0.9, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-4, fused=True),
}


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; rows for each model, optimizer and threshold."""
    for subject in subjects(setting):
        for name, make in OPTIMIZERS.items():
            yield from _steps(subject, name, make(subject.parameters), setting)
        yield _norm_alone(subject, setting)
    with threads(1):
        yield from _one_tensor(setting)


def _steps(subject: Subject, name: str, optimizer: Optimizer, setting: Setting) -> Iterator[Row]:
    """Measure a threshold that binds and one that does not, against the same bare steps."""
    norm, telemetry = subject.norm, Telemetry(setting.folder)
    _, wrapped, *_ = Booster().boost(subject.model, optimizer)

    def torchs() -> None:
        nn.utils.clip_grad_norm_(subject.parameters, BINDING * norm, foreach=True)
        optimizer.step()

    def ours(factor: float) -> Side:
        mode = build("norm", threshold=factor * norm)
        return subject.side(lambda: telemetry(wrapped.clip_and_step(mode)))

    sides = {"step": subject.side(optimizer.step), "torch": subject.side(torchs)}
    sides |= {"binding": ours(BINDING), "not binding": ours(FREE)}
    times = interleave(sides, setting.pairs())
    for binds, limit in (("binding", 0.50), ("not binding", 0.35)):
        most = 0.60 if isinstance(subject.model, Small) else limit
        what = f"{subject.name}, {name}, {binds}"
        yield compared(what, times, binds, "torch", most, bare="step")


def _norm_alone(subject: Subject, setting: Setting) -> Row:
    """Measure the norm against one dot product over a flat buffer of the same size."""
    layout = Layout.of_model(subject.model)
    flat = torch.cat([gradient.reshape(-1) for gradient in subject.gradients])
    sides = {
        "dot": subject.side(lambda: torch.dot(flat, flat)),
        "norm": subject.side(lambda: total_norm(layout)),
    }
    limit = None if isinstance(subject.model, Small) else 1.20
    what = f"{subject.name}, norm alone over one flat dot"
    return compared(what, interleave(sides, setting.pairs()), "norm", "dot", limit)


def _one_tensor(setting: Setting) -> Iterator[Row]:
    """Measure one long tensor: zeros against ordinary values, and the error at several sizes."""
    fewer = 100 if setting.quick else 1
    zeros, clock = torch.zeros(ZEROS // fewer, device=setting.device), clock_of(setting.device)
    usual = torch.randn_like(zeros)
    sides: dict[str, Side] = {
        "normal": lambda: clock(lambda: _norm(usual)),
        "zeros": lambda: clock(lambda: _norm(zeros)),
    }
    what = f"norm of {len(zeros):.0e} zeros over that of normal values"
    yield compared(what, interleave(sides, setting.pairs()), "zeros", "normal", 1.5)
    drawn = torch.Generator(setting.device).manual_seed(0)
    gradient = torch.randn(ACCURATE // fewer, device=setting.device, generator=drawn)
    yield _error(f"error of the norm of {len(gradient):.0e} elements", _norm, gradient, 1e-6)
    theirs = "the same, torch.nn.utils.get_total_norm"
    yield _error(theirs, lambda given: nn.utils.get_total_norm([given]), gradient)
    for scale in (1e25, 1e-25):
        scaled = gradient[: len(gradient) // 100] * scale
        yield _error(f"error of the norm of elements around {scale:.0e}", _norm, scaled, 1e-6)


def _norm(gradient: Tensor) -> Tensor | float:
    parameter = nn.Parameter(gradient.detach())
    parameter.grad = gradient
    return total_norm(Layout.of_parameters([parameter]))


def _error(
    what: str, norm: Callable[[Tensor], Tensor | float], given: Tensor, limit: float | None = None
) -> Row:
    exact = torch.linalg.vector_norm(given, dtype=torch.float64).item()
    return Row(what, Spread.of([abs(float(norm(given)) / exact - 1.0)]), limit, "error")
