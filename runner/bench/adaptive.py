"""Adaptive clipping against what the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from runner.bench.pairs import Side, interleave, milliseconds, ratio
from runner.bench.subjects import Small, Subject, Telemetry, subjects, thread_numbers, threads
from runner.bench.table import Row, Setting
from runner.clip import Layout, build

TITLE = (
    "adaptive clipping with its telemetry\n"
    "1.00 is the time to read the weights, to read the gradients, and to scale them in place"
)

BINDING, FREE = 1e-3, 1e3
"""Thresholds; the first is below the ratio of almost every unit, the second above all."""

EPS = 1e-3


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; one row for each model, number of threads and threshold."""
    for subject in subjects(setting.device, setting.quick):
        for number, where in thread_numbers(setting.device).items():
            with threads(number):
                yield from _rows(subject, where, setting)


def _rows(subject: Subject, where: str, setting: Setting) -> Iterator[Row]:
    sides = {
        "limit": subject.side(_limit(subject)),
        "ours": _ours(subject, BINDING, setting),
        "nothing clipped": _ours(subject, FREE, setting),
    }
    if setting.peers and (theirs := _timm(subject)):
        sides["timm"] = theirs
    many = isinstance(subject.model, Small)
    times = interleave(sides, setting.pairs())
    medians = milliseconds(times)
    for name in list(sides)[1:]:
        limit = 1.35 if name == "ours" and not many else None
        what = f"{subject.name}, {name}, {where}"
        shown = {"limit": medians["limit"], name: medians[name]}
        yield Row(what, ratio(times[name], times["limit"]), limit, ms=shown)
    if "timm" in times:
        what = f"{subject.name}, ours over timm, {where}"
        yield Row(what, ratio(times["ours"], times["timm"]), 0.5)


def _ours(subject: Subject, threshold: float, setting: Setting) -> Side:
    mode, layout = (
        build("adaptive", threshold=threshold, exclude=[]),
        Layout.of_model(subject.model),
    )
    mode.bind(layout)
    telemetry = Telemetry(setting.folder)

    @torch.no_grad()
    def work() -> None:
        telemetry(mode.clip(layout))

    return subject.side(work)


def _limit(subject: Subject) -> Callable[[], object]:
    """Return what reads as many weights and gradients, and scales the gradients in place."""
    weights = torch.randn(subject.elements, device=subject.device)
    gradients = torch.randn_like(weights)

    def work() -> None:
        torch.dot(weights, weights)
        torch.dot(gradients, gradients)
        gradients.mul_(1.0)

    return work


def _timm(subject: Subject) -> Side | None:
    try:
        from timm.utils.agc import adaptive_clip_grad
    except ImportError:
        return None
    clip: Callable[..., object] = adaptive_clip_grad
    return subject.side(lambda: clip(subject.parameters, clip_factor=BINDING, eps=EPS))
