"""Metrics of each step, kept on the device and written as rows in batches.

A step leaves 0-dimensional tensors; the host does not wait for an accelerator. Every
``flush_every`` steps they travel to the host in one transfer and become rows.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.config.notation import higher_is_better
from runner.run_folder import keys
from runner.run_folder.divergence import diverged_from
from runner.run_folder.strict_json import Row
from runner.telemetry.gauges import Gauges
from runner.telemetry.sinks import Sink
from runner.telemetry.step import StepMetrics, StepValues, on_host
from runner.telemetry.totals import Sums, spread


class HostStep(NamedTuple):
    """Metrics of one step on the host."""

    metrics: StepMetrics
    values: StepValues
    gauges: Sequence[float] | None  # values of :class:`Gauges`
    loss: float | None = None  # mean over data-parallel ranks
    noise: tuple[float, float] | None = None  # mean of the estimates over these ranks


@dataclass
class Meter:
    """Collects the metrics of steps, writes rows, and keeps what the summary of a run needs."""

    sinks: Sequence[Sink] = ()
    interval: int = 1
    flush_every: int = 50
    mean_over_data: Callable[[list[float]], list[float]] | None = None
    what_if: Sequence[float] = ()
    layers: Gauges | None = None
    follow: Callable[[Sequence[tuple[int, StepValues]]], None] | None = None
    skips: bool = False  # whether a rule skips spikes, which rows then count
    noise: deque[list[float]] | None = None  # :meth:`StepMetrics.estimates` of the last rows
    last: Row = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    _pending: list[StepMetrics] = field(default_factory=list)
    _window: Sums = field(default_factory=Sums)
    _total: Sums = field(default_factory=Sums)
    # Of every step: ‖G‖ before clipping, and ``Decision.max_stat``, NaN where it was skipped
    norms: array[float] = field(default_factory=lambda: array("d"))
    max_stats: array[float] = field(default_factory=lambda: array("d"))
    losses: array[float] = field(default_factory=lambda: array("d"))  # of every step
    _above: dict[float, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._above = {float(threshold): 0 for threshold in self.what_if}

    def row_due(self, step: int) -> bool:
        return step % self.interval == 0

    def push(self, step: StepMetrics, evaluation: Mapping[str, float] | None = None) -> None:
        self._pending.append(step)
        if evaluation is not None or len(self._pending) >= self.flush_every:
            self.flush(evaluation)

    def flush(self, last: Mapping[str, float] | None = None, together: bool = True) -> None:
        """Move pending metrics to the host and write rows; ``last`` are more of the last step.

        A rank that breaks off flushes without ``together``: its rows lack what others share.
        """
        pending = self._pending
        if not pending:
            return
        steps = self._with_means(self._on_host(pending, together), together)
        self._pending = []  # not before: a rank that loses its peers here flushes again alone
        for step in steps:
            self._count(step)
            further = last if step is steps[-1] else None
            if further is not None or self.row_due(step.metrics.step):
                self.write(self._row(step) | (step.values.inner or {}), further or {})
                self._window = Sums()
        if together and self.follow is not None:
            self.follow([(step.metrics.step, step.values) for step in steps])

    def _on_host(self, pending: Sequence[StepMetrics], together: bool) -> list[HostStep]:
        """Move the metrics of steps to the host."""
        values, rows = on_host(pending, self._gauges_over_ranks(pending, together))
        gauges = iter(rows)
        steps = []
        for metrics, of_step in zip(pending, values, strict=True):
            of_gauges = None if metrics.layers is None else next(gauges, None)
            steps.append(HostStep(metrics, of_step, of_gauges))
        return steps

    def _gauges_over_ranks(self, pending: Sequence[StepMetrics], together: bool) -> Tensor | None:
        """Return the values of all gauges, [steps, values]; None without gauges."""
        shares = [step.layers for step in pending if step.layers is not None]
        if self.layers is None or not shares:
            return None
        if not together and self.layers.layout.group is not None:
            return None
        return self.layers.over_ranks(shares)

    def _with_means(self, steps: Sequence[HostStep], together: bool) -> list[HostStep]:
        """Fill in losses and estimates of the noise, as means over data-parallel ranks.

        A rank that breaks off cannot know them.
        """
        losses: list[float] = [step.values.local_loss for step in steps]
        estimates: list[tuple[float, float]] = []
        if self.noise is not None:
            estimates = [step.metrics.estimates(step.values) for step in steps]
        if self.mean_over_data is not None:
            if not together:
                return list(steps)
            # All values travel together: losses, then trace and square of each estimate.
            numbers = [number for pair in estimates for number in pair]
            means = self.mean_over_data([*losses, *numbers])
            losses = means[: len(steps)]
            numbers = means[len(steps) :]
            estimates = list(zip(numbers[::2], numbers[1::2], strict=True))
        filled = []
        for number, step in enumerate(steps):
            loss = None if step.metrics.local_loss is None else losses[number]
            noise = estimates[number] if estimates else None
            filled.append(step._replace(loss=loss, noise=noise))
        return filled

    def summary(self) -> dict[str, Any]:
        total = self._total
        steps = max(total.steps, 1)
        return {
            "final": {key: value for key, value in self.last.items() if key != keys.TRAIN_STEP},
            "best": dict(self.best),
            keys.GRAD_NORM: spread(self.norms),
            keys.CLIP_PEAK: spread(self.max_stats),
            keys.CLIP_RATIO_TOTAL: total.clipped / steps,
            keys.CLIP_FRACTION: total.fraction / steps,
            **self._so_far(),
            keys.DIVERGED: self._diverged(),
            "steps": total.steps,
            "samples": self.last.get(keys.TRAIN_SAMPLES, 0),
        }

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        return {
            "last": dict(self.last),
            "best": dict(self.best),
            "window": asdict(self._window),
            "total": asdict(self._total),
            "norms": torch.from_numpy(np.array(self.norms)),
            "max_stats": torch.from_numpy(np.array(self.max_stats)),
            "losses": torch.from_numpy(np.array(self.losses)),
            "noise": list(self.noise or ()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending = []  # of steps that are left
        self.last = dict(state["last"])
        self.best = dict(state["best"])
        self._window = Sums(**state["window"])
        self._total = Sums(**state["total"])
        self.norms = array("d", state["norms"].tolist())
        self.max_stats = array("d", state["max_stats"].tolist())
        losses = state.get("losses")  # checkpoints of earlier versions have none
        self.losses = array("d", () if losses is None else losses.tolist())
        self._above = {t: sum(stat > t for stat in self.max_stats) for t in self._above}
        if self.noise is not None:
            self.noise.extend(state.get("noise", ()))

    def _diverged(self) -> int | None:
        """Return the step from which the training loss was lost until the end, or None."""
        position = diverged_from(self.losses)
        last_step = int(self.last.get(keys.TRAIN_STEP, len(self.losses)))
        first_step = max(1, last_step - len(self.losses) + 1)
        return None if position is None else first_step + position

    def _so_far(self) -> dict[str, float]:
        total = self._total
        steps = max(total.steps, 1)
        counts: dict[str, float] = {keys.GRAD_NONFINITE: total.nonfinite}
        if self.skips or total.skipped:
            counts[keys.CLIP_SKIPPED] = total.skipped
        for threshold, above in self._above.items():
            counts[f"{keys.WHAT_IF}{threshold}"] = above / steps
        return counts

    def _count(self, step: HostStep) -> None:
        values = step.values
        self.norms.append(values.norm)
        self.max_stats.append(values.max_stat)
        self._window.add(values)
        self._total.add(values)
        self._window.seconds += step.metrics.seconds
        for threshold in self._above:
            self._above[threshold] += values.max_stat > threshold
        if step.loss is not None:
            self.losses.append(step.loss)
            self._note_best({keys.TRAIN_LOSS: step.loss})
        if self.noise is not None and step.noise is not None and math.isfinite(sum(step.noise)):
            self.noise.append([*step.noise])

    def write(self, row: Row, further: Mapping[str, float]) -> None:
        row |= further
        self._note_best(further)
        self.last = self.last | row
        for sink in self.sinks:
            sink.write(row)

    def _row(self, step: HostStep) -> Row:
        metrics = step.metrics
        values = step.values
        window = self._window
        total = self._total
        samples = metrics.samples
        since = 0 if samples is None else samples - int(self.last.get(keys.TRAIN_SAMPLES, 0))
        scaled = values.norm_scaled
        row: dict[str, float | None] = {
            keys.TRAIN_STEP: metrics.step,
            keys.TRAIN_LOSS: step.loss,
            keys.TRAIN_LR: metrics.lr,
            keys.TRAIN_SAMPLES: samples,
            keys.TRAIN_TOKENS: metrics.tokens or None,
            keys.THROUGHPUT: None if samples is None else since / max(window.seconds, 1e-9),
            keys.GRAD_NORM: values.norm,
            keys.GRAD_NORM_CLIPPED: values.norm_clipped,
            keys.GRAD_NORM_MEAN: window.norm / window.steps,
            keys.GRAD_NORM_MAX: window.norm_max,
            keys.CLIP_COEF: values.coef,
            keys.CLIP_CLIPPED: int(values.clipped),
            keys.CLIP_FRACTION: values.fraction,
            keys.CLIP_RATIO: window.clipped / window.steps,
            keys.CLIP_RATIO_TOTAL: total.clipped / total.steps,
            keys.TIME_STEP: window.seconds / window.steps,
            keys.CLIP_THRESHOLD: None if math.isnan(values.threshold) else values.threshold,
            keys.GRAD_NORM_SCALED: None if math.isnan(scaled) else scaled,
            keys.NOISE_SCALE: self._noise_scale(),
        }
        full = {key: value for key, value in row.items() if value is not None} | self._so_far()
        if self.layers is not None and step.gauges is not None:
            full |= self.layers.row(step.gauges)
        return full

    def _noise_scale(self) -> float | None:
        """Return tr(Σ) ÷ |G|² over the last rows; None without a positive estimate of |G|²."""
        estimates = self.noise or ()
        square = math.fsum(square for _, square in estimates)
        return math.fsum(trace for trace, _ in estimates) / square if square > 0 else None

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            if not math.isnan(value):
                better = max if higher_is_better(key) else min
                self.best[key] = better(self.best.get(key, value), value)
