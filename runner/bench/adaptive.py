"""Adaptive clipping against what the memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from runner.bench.pairs import interleave
from runner.bench.peers import timm_adaptive
from runner.bench.subjects import Small, Subject, clipping, subjects
from runner.bench.table import Row, Setting, compared

TITLE = (
    "adaptive clipping with its telemetry, one thread\n"
    "1.00 is the time to read the weights, to read the gradients, and to scale them in place"
)

BINDING, FREE = 1e-3, 1e3
"""Thresholds; the first is below the ratio of almost every unit, the second above all."""


def rows(setting: Setting) -> Iterator[Row]:
    """Measure the table; one row for each model and threshold."""
    for subject in subjects(setting):
        sides = {
            "limit": subject.side(_limit(subject)),
            "ours": clipping(subject, setting, "adaptive", threshold=BINDING, exclude=[]),
            "nothing clipped": clipping(subject, setting, "adaptive", threshold=FREE, exclude=[]),
        }
        if setting.peers and (theirs := timm_adaptive(subject.parameters, BINDING)):
            sides["timm"] = subject.side(theirs)
        many = isinstance(subject.model, Small)
        times = interleave(sides, setting.pairs())
        for name in list(sides)[1:]:
            limit = 1.35 if name == "ours" and not many else None
            yield compared(f"{subject.name}, {name}", times, name, "limit", limit)
        if "timm" in times:
            yield compared(f"{subject.name}, ours over timm", times, "ours", "timm", 0.5)


def _limit(subject: Subject) -> Callable[[], object]:
    """Return what reads as many weights and gradients, and scales the gradients in place."""
    elements = sum(parameter.numel() for parameter in subject.parameters)
    weights = torch.randn(elements, device=subject.device)
    gradients = torch.randn_like(weights)

    def work() -> None:
        torch.dot(weights, weights)
        torch.dot(gradients, gradients)
        gradients.mul_(1.0)

    return work
