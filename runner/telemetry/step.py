"""Metrics of one optimizer step: where they were computed, and on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from runner.clip import Decision, Number, transfer


class StepMetrics(NamedTuple):
    """Metrics of one optimizer step.

    Attributes:
        step: number of the step, from 1.
        loss: this rank's share of the window's loss; the mean over data-parallel ranks is the loss.
        decision: what clipping did.
        lr: learning rate of the step.
        samples: samples read so far, over all ranks.
        tokens: tokens read so far, over all ranks; 0 for data without tokens.
        seconds: wall time of the step.
        layers: result of :meth:`LayerNorms.share`, for a step whose row logs layer norms.
    """

    step: int
    loss: Number
    decision: Decision
    lr: float
    samples: int
    tokens: int
    seconds: float
    layers: Tensor | None = None


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


def values_of(row: list[float]) -> StepValues:
    """Return the metrics of a step, of which nothing was clipped if its gradient is not finite.

    An accelerator that decides for itself reports what clipping would have made of it.
    """
    values = StepValues._make(row)
    if math.isfinite(values.norm):
        return values
    skipped = Decision.skipped(values.norm, values.threshold)
    return StepValues._make((values.loss, *skipped.metrics))
