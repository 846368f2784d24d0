"""What ``runner.check_clipping`` adds to the clipping of a step, on one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from runner.bench.timing import Row, Setting, clocked, interleave, row
from runner.check import check_clipping

Shapes = list[tuple[int, ...]]

_FILTERS = [(64, 64, 3, 3)] * 14 + [(128, 128, 3, 3)] * 15 + [(256, 256, 3, 3)] * 23
_BLOCK = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
SHAPES: dict[str, Shapes] = {
    "one matrix of 16 million": [(4096, 4096)],
    "filters and vectors of a ResNet, 30 million in 110": [
        *_FILTERS,
        *[(512, 512, 3, 3)] * 6,
        *[(256,)] * 52,
    ],
    "a GPT of 12 layers, 85 million in 148": [*_BLOCK * 12, *[(768,)] * 100],
    "2,000 small tensors": [*[(64, 64)] * 1000, *[(64,)] * 1000],
}
QUICK: dict[str, Shapes] = {"20 small tensors": [*[(64, 64)] * 10, *[(64,)] * 10]}
LIMIT = 3.0
BINDING = 0.5  # threshold, as a multiple of the norm


def rows(setting: Setting) -> Iterator[Row]:
    """Time that entering, leaving and reporting of a check add to the clipping, one thread.

    1.00 is the time of the clipping, torch.nn.utils.clip_grad_norm_(foreach=True)
    """
    for name, shapes in (QUICK if setting.quick else SHAPES).items():
        yield _by_norm(name, shapes, setting)
        yield _by_value(name, shapes, setting)


def _model_of(shapes: Shapes) -> tuple[nn.ParameterList, list[torch.Tensor]]:
    """Return a module of parameters, and a gradient for each."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(shape) for shape in shapes)
    return model, [torch.randn(shape) for shape in shapes]


def _by_norm(name: str, shapes: Shapes, setting: Setting) -> Row:
    model, gradients = _model_of(shapes)
    limit = BINDING * float(nn.utils.get_total_norm(gradients))

    def clip() -> torch.Tensor:
        return clip_grad_norm_(model.parameters(), limit, foreach=True)

    def clip_and_check() -> None:
        with check_clipping(model, limit) as check:
            norm = clip()
        check.strict(norm)

    return _compared(name, model, gradients, clip, clip_and_check, setting)


def _by_value(name: str, shapes: Shapes, setting: Setting) -> Row:
    model, gradients = _model_of(shapes)

    def clip() -> None:
        clip_grad_value_(model.parameters(), 1.0, foreach=True)

    def clip_and_check() -> None:
        with check_clipping(model, 1.0, mode="value") as check:
            clip()
        check.strict()

    return _compared(f"{name}, value", model, gradients, clip, clip_and_check, setting, limit=None)


def _compared(
    name: str,
    model: nn.ParameterList,
    gradients: list[torch.Tensor],
    clip: Callable[[], object],
    clip_and_check: Callable[[], object],
    setting: Setting,
    limit: float | None = LIMIT,
) -> Row:
    """Return the row of a clipping with a check and without one, on the same gradients."""

    def timed(work: Callable[[], object]) -> Callable[[], float]:
        def side() -> float:
            for parameter, gradient in zip(model, gradients, strict=True):
                parameter.grad = gradient.clone()
            return clocked(work)

        return side

    times = interleave({"clip": timed(clip), "both": timed(clip_and_check)}, setting.pairs())
    pairs = list(zip(times["both"], times["clip"], strict=True))
    ratios = [(both - alone) / alone for both, alone in pairs]
    medians = {side: 1e3 * statistics.median(values) for side, values in times.items()}
    return row(name, ratios, limit, ms=medians)
