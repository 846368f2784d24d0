"""Metrics of one optimizer step: where they were computed, and on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from runner.clip import Decision, Number, transfer
from runner.run_folder import keys
from runner.telemetry.noise_scale import NoiseShare


class StepMetrics(NamedTuple):
    """Metrics of one optimizer step."""

    step: int
    loss: Number
    decision: Decision
    lr: float
    samples: int
    tokens: int
    seconds: float
    layers: Tensor | None = None
    noise: NoiseShare | None = None


class StepValues(NamedTuple):
    """Metrics of one optimizer step on the host: its loss, and those of its decision."""

    loss: float
    norm: float
    norm_clipped: float
    coef: float
    clipped: float
    fraction: float
    max_stat: float
    threshold: float
    norm_scaled: float = math.nan
    spike: float = 0.0


def metrics_of(step: StepMetrics) -> tuple[Number, ...]:
    """Return all numbers of a step: those of :class:`StepValues`, of its noise, of inner modes."""
    scaled = step.decision.norm_scaled
    own = (
        step.loss,
        *step.decision.metrics,
        math.nan if scaled is None else scaled,
        step.decision.spike,
    )
    if step.noise is not None:
        own = (*own, *step.noise)
    if not step.decision.inner:
        return own
    return (*own, *(number for _, each in _inner(step.decision) for number in each.metrics))


def noise_of(step: StepMetrics, row: Sequence[float]) -> Sequence[float] | None:
    """Return the numbers of ``step.noise``, given what :func:`metrics_of` returned, on the host."""
    first = len(StepValues._fields)
    return None if step.noise is None else row[first : first + len(NoiseShare._fields)]


def inner_row(step: StepMetrics, row: Sequence[float]) -> dict[str, float]:
    """Return the metrics of modes inside of the clipping mode, by their keys."""
    if not step.decision.inner or not math.isfinite(row[1]):
        return {}
    named = (key for path, _ in _inner(step.decision) for key in keys.inner(path))
    own = row[len(StepValues._fields) + len(step.noise or ()) :]
    return {key: value for key, value in zip(named, own, strict=True) if not math.isnan(value)}


def _inner(
    decision: Decision, path: tuple[tuple[str, str], ...] = ()
) -> Iterator[tuple[tuple[tuple[str, str], ...], Decision]]:
    for kind, name, each in decision.inner:
        yield (*path, (kind, name)), each
        yield from _inner(each, (*path, (kind, name)))


def on_host(
    rows: list[tuple[Number, ...]], layers: Tensor | None
) -> tuple[list[list[float]], Iterator[list[float]]]:
    """Return rows of metrics and rows of layer norms as floats, in one transfer."""
    if layers is None and {*map(type, chain.from_iterable(rows))} <= {float, int}:
        return [list(map(float, row)) for row in rows], iter(())
    away = [value for row in rows for value in row if isinstance(value, Tensor)]
    parts = [transfer.on_device(away, away[0].device)] if away else []
    if layers is not None:
        parts.append(layers.flatten())
    values = iter(torch.cat(parts).tolist() if parts else [])
    metrics = [[next(values) if isinstance(f, Tensor) else float(f) for f in row] for row in rows]
    norms = [] if layers is None else [list(islice(values, len(row))) for row in layers]
    return metrics, iter(norms)


def values_of(row: Sequence[float]) -> StepValues:
    """Return the metrics of a step, of which nothing was clipped if its gradient is not finite."""
    values = StepValues._make(row[: len(StepValues._fields)])
    if math.isfinite(values.norm):
        return values
    skipped = Decision.skipped(values.norm, values.threshold)
    return StepValues(*map(float, (values.loss, *skipped.metrics)))
