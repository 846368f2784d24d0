"""The numbers of one optimizer step, by key: where they were computed, and on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.clip import Decision
from runner.gradients import transfer
from runner.run_folder import keys
from runner.run_folder.strict_json import Row

# Numbers of a step by key: tensors where they were computed, or None for one that is not known
Numbers = dict[str, Tensor | float | None]


@dataclass(slots=True)
class StepMetrics:
    """What is known of one optimizer step, before it travels to the host.

    Attributes:
        step: the number of the step.
        decision: what clipping did.
        numbers: all else, by the key that its row has: 0-dimensional tensors where they were
            computed, numbers of the host, None for one that is not known.
        layers: what :class:`runner.telemetry.gauges.Gauges` measured, [values].
        powers: what :class:`runner.telemetry.dominant.Dominant` knows, [parameters].
        loss_weight: what the loss in ``numbers`` is multiplied by, on the host.
    """

    step: int
    decision: Decision
    numbers: Numbers
    layers: Tensor | None = None
    powers: Tensor | None = None
    loss_weight: float = 1.0

    @property
    def local_loss(self) -> Tensor | float | None:
        """The part of this rank in the loss.

        The mean of it over data-parallel ranks, of which one for each pipeline has it, is the loss
        of the step. In one process it is the loss.
        """
        loss = self.numbers[keys.LOCAL_LOSS]
        if isinstance(loss, Tensor):
            loss = loss.to(transfer.widest(loss.device))
        return None if loss is None else loss * self.loss_weight


def noise_estimates(first: Tensor, share: float, samples: int, norm: Tensor) -> Numbers:
    """Return this rank's estimates of tr(Σ) and |G|², by key.

    Σ is the covariance of the gradient of a sample, G its mean. The squared norms of the first
    microbatch and of the step give both without bias (McCandlish et al. 2018, arXiv 1812.06162,
    appendix A.1).

    Args:
        first: squared norm of the gradient of the first microbatch, 0-dimensional.
        share: its share of the items of the step.
        samples: samples of the step.
        norm: ‖G‖ of the step.
    """
    whole = norm * norm
    trace = (first - whole) * samples * share / (1 - share)
    square = (whole - share * first) / (1 - share)
    return {keys.LOCAL_TRACE: trace, keys.LOCAL_SQUARE: square}


def on_host(
    steps: Sequence[StepMetrics], gauged: Tensor | None = None
) -> tuple[list[Row], list[list[float]]]:
    """Return the numbers of steps by key, and the rows of ``gauged``, in one transfer to the host.

    A number that a step does not have is left out.
    """
    columns = Decision.stacked([metrics.decision for metrics in steps]).numbers
    device = columns["norm"].device
    wide = transfer.widest(device)
    vectors = [column.to(wide) for column in columns.values()]
    rows = [metrics.numbers | _further(metrics.decision) for metrics in steps]
    tensors = _tensors_of(rows)
    if tensors:
        vectors.append(torch.stack([tensor.detach().to(device, wide) for tensor in tensors]))
    if gauged is not None:
        vectors.append(gauged.flatten())
    read = transfer.to_host(vectors)
    gauges = [] if gauged is None else _rows(read.pop(), gauged.shape[1])
    if tensors:
        _replace_tensors(rows, read.pop())
    for metrics, row in zip(steps, rows, strict=True):
        loss = row[keys.LOCAL_LOSS]
        if loss is not None:
            row[keys.LOCAL_LOSS] = float(loss) * metrics.loss_weight
    numbers = []
    for metrics, row, of_decision in zip(steps, rows, zip(*read, strict=True), strict=True):
        numbers.append(_numbers_of(metrics, row, of_decision))
    return numbers, gauges


def _tensors_of(rows: Sequence[Numbers]) -> list[Tensor]:
    """Return the tensors of all rows, in order."""
    return [number for row in rows for number in row.values() if isinstance(number, Tensor)]


def _replace_tensors(rows: Sequence[Numbers], floats: Sequence[float]) -> None:
    """Put the numbers that were read in place of the tensors of all rows, in order."""
    remaining = iter(floats)
    for row in rows:
        for key, number in row.items():
            if isinstance(number, Tensor):
                row[key] = next(remaining)


def _numbers_of(metrics: StepMetrics, row: Numbers, of_decision: Sequence[float]) -> Row:
    """Return the numbers that a step has; one whose gradient is not finite clips nothing."""
    decided = dict(zip(keys.OF_DECISION.values(), of_decision, strict=True))
    if not math.isfinite(decided[keys.GRAD_NORM]):
        row = {key: row[key] for key in metrics.numbers}
        decided |= _NOTHING_CLIPPED
    return _present({keys.TRAIN_STEP: metrics.step} | row | decided)


# Numbers of the decision on a step that is skipped
_NOTHING_CLIPPED = {
    keys.GRAD_NORM_CLIPPED: math.nan,
    keys.CLIP_COEF: math.nan,
    keys.CLIP_CLIPPED: 0.0,
    keys.CLIP_FRACTION: 0.0,
    keys.CLIP_PEAK: math.nan,
}


def _further(decision: Decision) -> Numbers:
    """Return the numbers of a decision that only some steps have, by key."""
    further: Numbers = {}
    if decision.norm_scaled is not None:
        further[keys.GRAD_NORM_SCALED] = decision.norm_scaled
    if decision.spike is not None:
        further[keys.CLIP_SPIKE] = decision.spike
    for path, inner in _inner(decision):
        for name, number in inner.numbers.items():
            further[keys.inner(path, name)] = number
    return further


def _inner(
    decision: Decision, path: tuple[tuple[str, str], ...] = ()
) -> Iterator[tuple[tuple[tuple[str, str], ...], Decision]]:
    """Yield the decisions of inner modes at any depth, each with the way to it."""
    for kind, name, inner in decision.inner:
        place = (*path, (kind, name))
        yield place, inner
        yield from _inner(inner, place)


def _rows(values: Sequence[float], size: int) -> list[list[float]]:
    return [list(values[start : start + size]) for start in range(0, len(values), size)]


def _present(numbers: Mapping[str, Any]) -> Row:
    """Return the numbers that are there: NaN of most of them means that there is none."""
    present: Row = {}
    for key, number in numbers.items():
        if number is not None and (key in keys.ALWAYS or not math.isnan(number)):
            present[key] = number
    return present
