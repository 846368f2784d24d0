"""What is measured in each step, kept where it was computed, and turned into rows in bulk.

A step leaves its figures here as they are: floats on a CPU, 0-dimensional tensors on an
accelerator, which is never waited for in between. Every ``flush`` steps they travel to the host in
one transfer, are turned into rows (one every ``interval`` steps), and go to every sink alike.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from runner.clip import Number, Outcome, transfer
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.sinks.sink import Sink


class StepMetrics(NamedTuple):
    """The figures of one optimizer step.

    Attributes:
        step: its number, from 1.
        loss: this rank's share of the window's loss; the mean over data ranks is the loss.
        outcome: what clipping did.
        lr: learning rate that the step was taken with.
        samples: read so far, over all ranks.
        tokens: read so far, over all ranks; 0 where there are none.
        seconds: wall time of the step.
        extra: further figures for this step's row (already on the host).
    """

    step: int
    loss: Number
    outcome: Outcome
    lr: float
    samples: int
    tokens: int
    seconds: float
    extra: Mapping[str, float]


@dataclass
class LogWindow:
    """Sums over the steps since the last row."""

    steps: int = 0
    clipped: float = 0.0
    norm: float = 0.0
    norm_max: float = 0.0
    seconds: float = 0.0


@dataclass
class Meter:
    """Collects steps, writes rows, and keeps what the summary needs of every step.

    Args:
        sinks: where rows go; none on ranks other than the first.
        interval: steps between rows.
        flush_every: steps between transfers to the host.
        mean_over_data: mean of host figures over the data-parallel ranks, where there are several.
            All ranks flush at the same steps, so this is one collective a flush.
        what_if: thresholds to count the steps of that each would have clipped, had the run gone the
            same way: those whose ``Outcome.peak`` is above it.
    """

    sinks: Sequence[Sink] = ()
    interval: int = 1
    flush_every: int = 50
    mean_over_data: Callable[[list[float]], list[float]] | None = None
    what_if: Sequence[float] = ()
    nonfinite: int = 0
    samples: int = 0
    last: Row = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    _pending: list[StepMetrics] = field(default_factory=list)
    _window: LogWindow = field(default_factory=LogWindow)
    _norms: array[float] = field(default_factory=lambda: array("d"))
    _peaks: array[float] = field(default_factory=lambda: array("d"))
    _clipped: float = 0.0
    _fraction: float = 0.0
    _above: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.what_if = tuple(dict.fromkeys(map(float, self.what_if)))
        self._above = [0] * len(self.what_if)

    def push(self, step: StepMetrics, evaluation: Mapping[str, float] | None = None) -> None:
        """Take a step's figures; they leave for the host with the next flush.

        Args:
            step: the figures.
            evaluation: further keys for this step, which then gets a row at once, whatever the
                interval. Empty at the end of a run that evaluates nothing.
        """
        self._pending.append(step)
        if evaluation is not None or len(self._pending) >= self.flush_every:
            self.flush(evaluation)

    def flush(self, last: Mapping[str, float] | None = None, together: bool = True) -> None:
        """Bring all pending figures to the host and write their rows.

        Args:
            last: further keys for the newest step, see :meth:`push`.
            together: whether the other ranks flush too. When a run breaks off they do not, and the
                loss, which is theirs as well, is left out where there are several.
        """
        pending = self._pending
        if not pending:
            return
        figures = _on_host([(step.loss, *step.outcome[:6]) for step in pending])
        losses: list[float] | list[None] = [row[0] for row in figures]
        if self.mean_over_data is not None:
            alone = [None] * len(pending)
            losses = self.mean_over_data([row[0] for row in figures]) if together else alone
        self._pending = []
        for i, (step, loss, row) in enumerate(zip(pending, losses, figures, strict=True)):
            newest = last if last is not None and i == len(pending) - 1 else None
            outcome = Outcome._make((*row[1:], step.outcome.threshold))
            self._take(step, loss, outcome, newest)

    def summary(self) -> dict[str, Any]:
        """Figures of the whole run: every step counts, whatever the interval between rows."""
        steps = len(self._norms)
        return {
            "final": {key: value for key, value in self.last.items() if key != keys.TRAIN_STEP},
            "best": dict(self.best),
            keys.GRAD_NORM: _spread(self._norms),
            keys.CLIP_PEAK: _spread(self._peaks),
            keys.CLIP_RATIO_TOTAL: self._clipped / steps if steps else 0.0,
            keys.CLIP_FRACTION: self._fraction / steps if steps else 0.0,
            **self._shares(),
            keys.GRAD_NONFINITE: self.nonfinite,
            "steps": steps,
            "samples": self.samples,
        }

    @property
    def norms(self) -> list[float]:
        """‖G‖ before clipping of every step that has left the device."""
        return self._norms.tolist()

    @property
    def peaks(self) -> list[float]:
        """``Outcome.peak`` of the same steps, NaN where a step was skipped."""
        return self._peaks.tolist()

    def _shares(self) -> dict[str, float]:
        """Share of the steps so far that each threshold of ``what_if`` would have clipped."""
        steps = max(len(self._peaks), 1)
        each = zip(self.what_if, self._above, strict=True)
        return {keys.what_if(threshold): above / steps for threshold, above in each}

    def _take(
        self,
        step: StepMetrics,
        loss: float | None,
        outcome: Outcome,
        newest: Mapping[str, float] | None,
    ) -> None:
        if not math.isfinite(outcome.norm):
            # An accelerator that decides for itself reports what clipping would have made of it.
            outcome = Outcome.skipped(outcome.norm, outcome.threshold)
            self.nonfinite += 1
        norm, clipped = float(outcome.norm), float(outcome.clipped)
        self._norms.append(norm)
        peak = float(outcome.peak)
        self._peaks.append(peak)
        for i, threshold in enumerate(self.what_if):
            self._above[i] += peak > threshold
        self._clipped += clipped
        self._fraction += float(outcome.fraction)
        self.samples = step.samples
        window = self._window
        window.steps += 1
        window.clipped += clipped
        window.norm += norm
        window.norm_max = norm if math.isnan(norm) else max(window.norm_max, norm)
        window.seconds += step.seconds
        if loss is not None:
            self._best(keys.TRAIN_LOSS, loss)
        if step.step % self.interval and newest is None:
            return
        row = self._row(step, loss, outcome)
        row.update(step.extra)
        row.update(newest or {})
        for key, value in (newest or {}).items():
            self._best(key, value)
        self.last |= row
        self._window = LogWindow()
        for sink in self.sinks:
            sink.write(row)

    def _row(self, step: StepMetrics, loss: float | None, outcome: Outcome) -> Row:
        window, before = self._window, int(self.last.get(keys.TRAIN_SAMPLES, 0))
        row: Row = {keys.TRAIN_STEP: step.step}
        if loss is not None:
            row[keys.TRAIN_LOSS] = loss
        row |= {keys.TRAIN_LR: step.lr, keys.TRAIN_SAMPLES: step.samples}
        if step.tokens:
            row[keys.TRAIN_TOKENS] = step.tokens
        row |= {
            keys.GRAD_NORM: float(outcome.norm),
            keys.GRAD_NORM_CLIPPED: float(outcome.norm_clipped),
            keys.GRAD_NORM_MEAN: window.norm / window.steps,
            keys.GRAD_NORM_MAX: window.norm_max,
            keys.GRAD_NONFINITE: self.nonfinite,
            keys.CLIP_COEF: float(outcome.coef),
            keys.CLIP_CLIPPED: int(outcome.clipped),
            keys.CLIP_FRACTION: float(outcome.fraction),
            keys.CLIP_RATIO: window.clipped / window.steps,
            keys.CLIP_RATIO_TOTAL: self._clipped / len(self._norms),
            keys.TIME_STEP: window.seconds / window.steps,
            keys.THROUGHPUT: (step.samples - before) / max(window.seconds, 1e-9),
        }
        if not math.isnan(outcome.threshold):
            row[keys.CLIP_THRESHOLD] = outcome.threshold
        if self.what_if:
            row |= self._shares()
        return row

    def _best(self, key: str, value: float) -> None:
        """Lowest loss, highest accuracy."""
        known = self.best.get(key)
        if math.isnan(value):
            return
        better = max if key.endswith("accuracy") else min
        self.best[key] = value if known is None else better(known, value)


def _spread(figures: array[float]) -> dict[str, float]:
    """Percentiles, largest and mean of the finite ones; empty where there is none."""
    every = np.asarray(figures, dtype=np.float64)
    finite = every[np.isfinite(every)]
    if not finite.size:
        return {}
    points = np.percentile(finite, (50, 90, 95, 99))
    spread = dict(zip(("p50", "p90", "p95", "p99"), map(float, points), strict=True))
    return spread | {"max": float(finite.max()), "mean": float(finite.mean())}


def _on_host(rows: list[tuple[Number, ...]]) -> list[list[float]]:
    """All figures as floats; those of an accelerator in one transfer."""
    away = [f for row in rows for f in row if isinstance(f, Tensor)]
    if not away:
        return [[float(figure) for figure in row] for row in rows]
    here = iter(transfer.on_device(away, away[0].device).tolist())
    return [[next(here) if isinstance(f, Tensor) else float(f) for f in row] for row in rows]
