"""The metrics of one optimizer step: as tensors where they were computed, and on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from runner.clip import Decision
from runner.gradients import transfer
from runner.run_folder import keys
from runner.run_folder.strict_json import Row


class FirstMicrobatch(NamedTuple):
    """What the noise scale needs of the first microbatch of a step."""

    square: Tensor | float  # squared norm of its gradient on this rank
    share: float  # of the items of the step
    samples: int  # of the step


class StepMetrics(NamedTuple):
    """Metrics of one optimizer step, where they were computed; None where they are not known.

    ``local_loss`` is the part of this rank: the mean of it over data-parallel ranks, of which one
    for each pipeline has it, is the loss of the step. In one process it is the loss.
    """

    step: int
    local_loss: Tensor | float | None
    decision: Decision
    lr: float | None
    samples: int | None
    tokens: int | None
    seconds: float
    layers: Tensor | None = None
    first: FirstMicrobatch | None = None

    def estimates(self, values: StepValues) -> tuple[float, float]:
        """Return this rank's estimates of tr(Σ) and |G|², NaN where it measured nothing.

        Σ is the covariance of the gradient of a sample, G its mean. The squared norms of the first
        microbatch, a share f of a step of S samples, and of the step give both without bias
        (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).
        """
        if self.first is None:
            return math.nan, math.nan
        share = self.first.share
        whole = values.norm * values.norm
        trace = (values.first - whole) * self.first.samples * share / (1 - share)
        square = (whole - share * values.first) / (1 - share)
        return trace, square


class StepValues(NamedTuple):
    """Metrics of one optimizer step on the host: this rank's loss, and numbers of its decision."""

    local_loss: float
    norm: float
    norm_clipped: float
    coef: float
    clipped: float
    fraction: float
    max_stat: float
    threshold: float
    norm_scaled: float = math.nan
    spike: float = 0.0
    first: float = math.nan  # squared norm of the gradient of this rank's first microbatch
    inner: Row | None = None  # metrics of inner modes

    def skipped(self) -> StepValues:
        """Return the values of this step if it was not taken."""
        return StepValues(
            local_loss=self.local_loss,
            norm=self.norm,
            norm_clipped=math.nan,
            coef=math.nan,
            clipped=0.0,
            fraction=0.0,
            max_stat=math.nan,
            threshold=self.threshold or math.nan,
        )


def on_host(
    steps: Sequence[StepMetrics], gauged: Tensor | None = None
) -> tuple[list[StepValues], list[list[float]]]:
    """Return the values of steps, and the rows of ``gauged``, in one transfer to the host."""
    decisions = Decision.stacked([metrics.decision for metrics in steps])
    wide = transfer.widest(decisions.norm.device)
    vectors = [column.to(wide) for column in decisions.metrics]
    further = [dict(_beside_decision(metrics)) for metrics in steps]
    tensors = [n for numbers in further for n in numbers.values() if isinstance(n, Tensor)]
    if tensors:
        vectors.append(torch.stack([tensor.to(wide) for tensor in tensors]))
    if gauged is not None:
        vectors.append(gauged.flatten())
    read = transfer.to_host(vectors)
    gauges = [] if gauged is None else _rows(read.pop(), gauged.shape[1])
    read_further = _with_floats(further, read.pop() if tensors else ())
    rows = zip(read_further, zip(*read, strict=True), strict=True)
    return [_values(of_decision, numbers) for numbers, of_decision in rows], gauges


def _with_floats(
    rows: Sequence[Mapping[str, Tensor | float]], read: Sequence[float]
) -> list[dict[str, float]]:
    """Return rows with the numbers that were read in place of their tensors, in their order."""
    numbers = iter(read)
    floats = []
    for row in rows:
        of_row = {}
        for name, value in row.items():
            of_row[name] = next(numbers) if isinstance(value, Tensor) else float(value)
        floats.append(of_row)
    return floats


def _rows(values: Sequence[float], size: int) -> list[list[float]]:
    return [list(values[start : start + size]) for start in range(0, len(values), size)]


def _beside_decision(metrics: StepMetrics) -> Iterator[tuple[str, Tensor | float]]:
    """Yield what is known of a step beside the numbers of its decision.

    By names of :class:`StepValues`, and by keys of metrics of inner modes.
    """
    decision = metrics.decision
    yield "local_loss", math.nan if metrics.local_loss is None else metrics.local_loss
    if decision.norm_scaled is not None:
        yield "norm_scaled", decision.norm_scaled
    if decision.spike is not None:
        yield "spike", decision.spike
    if metrics.first is not None:
        yield "first", metrics.first.square
    if decision.inner:
        yield from _of_inner(decision)


def _of_inner(
    decision: Decision, path: tuple[tuple[str, str], ...] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers of inner modes at any depth, by their keys."""
    for kind, name, inner in decision.inner:
        place = (*path, (kind, name))
        yield from zip(keys.inner(place), inner.metrics, strict=True)
        yield from _of_inner(inner, place)


def _values(of_decision: Sequence[float], numbers: dict[str, float]) -> StepValues:
    """Return the values of a step, given :attr:`Decision.metrics` and further numbers by name."""
    norm, norm_clipped, coef, clipped, fraction, max_stat, threshold = of_decision
    values = StepValues(
        local_loss=numbers.pop("local_loss"),
        norm=norm,
        norm_clipped=norm_clipped,
        coef=coef,
        clipped=clipped,
        fraction=fraction,
        max_stat=max_stat,
        threshold=threshold,
        norm_scaled=numbers.pop("norm_scaled", math.nan),
        spike=numbers.pop("spike", 0.0),
        first=numbers.pop("first", math.nan),
    )
    if not math.isfinite(values.norm):  # nothing was clipped
        return values.skipped()
    if not numbers:
        return values
    return values._replace(inner={k: v for k, v in numbers.items() if not math.isnan(v)})
