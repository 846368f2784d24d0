"""What clipping by the norm adds to an optimizer step, and the norm alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.bench.pairs import Side, Spread, added, interleave, milliseconds, ratio
from runner.bench.subjects import (
    Small,
    Subject,
    Telemetry,
    clock_of,
    exact_power,
    subjects,
    thread_numbers,
    threads,
)
from runner.bench.table import Row, Setting
from runner.booster import Booster, OptimizerWrapper
from runner.clip import Layout, build, total_norm

TITLE = (
    "time that clipping and telemetry add to a fused optimizer step\n"
    "1.00 is what torch.nn.utils.clip_grad_norm_(foreach=True) adds, unless a row says otherwise"
)

BINDING, FREE = 0.5, 2.0
"""Thresholds, as multiples of the norm."""

ZEROS = 30_000_000
ACCURATE = 100_000_000
"""Elements of the tensors that the norm alone is measured on."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; one row for each model, optimizer, number of threads and threshold."""
    for subject in subjects(setting.device, setting.quick):
        for name, make in OPTIMIZERS.items():
            optimizer = make(subject.parameters)
            _, wrapped, *_ = Booster().boost(subject.model, optimizer)
            for number, where in thread_numbers(setting.device).items():
                with threads(number):
                    yield from _steps(subject, name, optimizer, wrapped, where, setting)
            if setting.device != "cpu":
                yield _synchronisations(subject, wrapped)
        for number, where in thread_numbers(setting.device).items():
            with threads(number):
                yield _norm_alone(subject, where, setting)
    yield from _one_tensor(setting)
    if setting.device != "cpu":
        yield _bandwidth(setting)


def _sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True)


def _adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd+momentum": _sgd,
    "adamw": _adamw,
}


def _steps(
    subject: Subject,
    name: str,
    optimizer: Optimizer,
    wrapped: OptimizerWrapper,
    where: str,
    setting: Setting,
) -> Iterator[Row]:
    """Measure a threshold that binds and one that does not, against the same bare steps."""
    norm, telemetry = subject.norm, Telemetry(setting.folder)

    def torchs() -> None:
        nn.utils.clip_grad_norm_(subject.parameters, BINDING * norm, foreach=True)
        optimizer.step()

    def ours(factor: float) -> Side:
        mode = build("norm", threshold=factor * norm)
        return subject.side(lambda: telemetry(wrapped.clip_and_step(mode)))

    sides = {
        "step": subject.side(optimizer.step),
        "torch": subject.side(torchs),
        "binding": ours(BINDING),
        "not binding": ours(FREE),
    }
    limits: dict[str, float | None] = {"binding": 0.50, "not binding": 0.35}
    if isinstance(subject.model, Small):
        limits = dict.fromkeys(limits, 0.60)
    yield from _added(sides, f"{subject.name}, {name}, {{}}, {where}", limits, setting)


def _added(
    sides: Mapping[str, Side], what: str, limits: Mapping[str, float | None], setting: Setting
) -> Iterator[Row]:
    """Yield a row for each side of ``limits``: what it adds to ``step``, over what torch adds."""
    times = interleave(sides, setting.pairs())
    medians = milliseconds(times)
    for binds, limit in limits.items():
        spread = added(times[binds], times["torch"], times["step"])
        shown = {"step": medians["step"], "torch": medians["torch"], "ours": medians[binds]}
        yield Row(what.format(binds), spread, limit, ms=shown)


def _norm_alone(subject: Subject, where: str, setting: Setting) -> Row:
    """Measure the norm against one dot product over a flat buffer of the same size."""
    layout = Layout.of_model(subject.model)
    flat = torch.cat([gradient.reshape(-1) for gradient in subject.gradients])
    sides = {
        "dot": subject.side(lambda: torch.dot(flat, flat)),
        "norm": subject.side(lambda: total_norm(layout)),
    }
    times = interleave(sides, setting.pairs())
    limit = None if isinstance(subject.model, Small) else 1.20
    what = f"{subject.name}, norm alone over one flat dot, {where}"
    return Row(what, ratio(times["norm"], times["dot"]), limit, ms=milliseconds(times))


def _one_tensor(setting: Setting) -> Iterator[Row]:
    """Measure one long tensor: zeros against ordinary values, and the error at several sizes."""
    yield _zeros(setting)
    elements = ACCURATE // 100 if setting.quick else ACCURATE
    gradient = torch.randn(elements, device=setting.device, generator=_drawn(setting.device))
    exact = math.sqrt(exact_power(gradient))
    torchs = float(nn.utils.get_total_norm([gradient]))
    yield _error(f"error of the norm of {elements:.0e} elements", _norm(gradient), exact, 1e-6)
    yield _error("the same, torch.nn.utils.get_total_norm", torchs, exact)
    few = gradient[: elements // 100]
    for scale in (1e25, 1e-25):
        scaled = few * scale
        exact = math.sqrt(exact_power(scaled))
        what = f"error of the norm of elements around {scale:.0e}"
        yield _error(what, _norm(scaled), exact, 1e-6)


def _zeros(setting: Setting) -> Row:
    """Measure the norm of an all-zero gradient against that of ordinary values."""
    zeros = torch.zeros(ZEROS // (100 if setting.quick else 1), device=setting.device)
    usual, clock = torch.randn_like(zeros), clock_of(setting.device)
    sides: dict[str, Side] = {
        "normal": lambda: clock(lambda: total_norm(_layout(usual))),
        "zeros": lambda: clock(lambda: total_norm(_layout(zeros))),
    }
    times = interleave(sides, setting.pairs())
    what = f"norm of {len(zeros):.0e} zeros over that of normal values"
    return Row(what, ratio(times["zeros"], times["normal"]), 1.5, ms=milliseconds(times))


def _layout(gradient: Tensor) -> Layout:
    parameter = nn.Parameter(gradient.detach(), requires_grad=True)
    parameter.grad = gradient
    return Layout.of_parameters([parameter])


def _norm(gradient: Tensor) -> float:
    return float(total_norm(_layout(gradient)))


def _drawn(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _error(what: str, norm: float, exact: float, limit: float | None = None) -> Row:
    return Row(what, Spread.of([abs(norm / exact - 1.0)]), limit, "error")


def _synchronisations(subject: Subject, wrapped: OptimizerWrapper) -> Row:
    """Count the operations of a step for which the host waits for the GPU."""
    mode = build("norm", threshold=BINDING * subject.norm)
    subject.restore()
    wrapped.clip_and_step(mode)  # the first one may allocate
    subject.restore()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped.clip_and_step(mode)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(each.message) for each in caught)
    return Row(f"{subject.name}, synchronisations of a step", Spread.of([waits]), 0, "times")


def _bandwidth(setting: Setting) -> Row:
    """Measure how fast the device reads and writes 1 GiB in place."""
    buffer = torch.ones(2**28 // (100 if setting.quick else 1), device=setting.device)
    clock = clock_of(setting.device)
    seconds = [clock(lambda: buffer.mul_(1.0)) for _ in range(setting.pairs() + 1)][1:]
    moved = 2e-9 * buffer.numel() * buffer.element_size()
    return Row(
        "device, read and write in place", Spread.of(moved / s for s in seconds), None, "GB/s"
    )
