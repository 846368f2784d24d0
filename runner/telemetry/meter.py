"""Metrics of each step, kept on the device and written as rows in batches.

A step leaves its metrics here as floats on a CPU, and as tensors on an accelerator, for which the
host does not wait. Every ``flush_every`` steps they travel to the host in one transfer and become
rows (one every ``interval`` steps), the same for every sink.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch

from runner.config.objective import higher_is_better
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.layer_norms import LayerNorms
from runner.telemetry.sinks.sink import Sink
from runner.telemetry.step import StepMetrics, StepValues, on_host, values_of


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
    """Collects the metrics of steps, writes rows, and keeps what the summary of a run needs.

    Args:
        sinks: where rows go; empty on all ranks but the first.
        interval: steps between rows.
        flush_every: steps between transfers to the host.
        mean_over_data: averages values of the host over the data-parallel ranks; None where there
            is one. All ranks flush at the same steps, so this is one collective a flush.
        what_if: further thresholds: the share of steps whose ``Decision.max_stat`` is above each.
            It would have clipped these steps if the run had gone the same way.
        layers: measures the layer norms that rows log, if they do.
        follow: called with the number and the norm of each step of a flush, on all ranks alike;
            not when a run breaks off.
    """

    sinks: Sequence[Sink] = ()
    interval: int = 1
    flush_every: int = 50
    mean_over_data: Callable[[list[float]], list[float]] | None = None
    what_if: Sequence[float] = ()
    layers: LayerNorms | None = None
    follow: Callable[[Sequence[tuple[int, float]]], None] | None = None
    nonfinite: int = 0
    last: Row = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    _pending: list[StepMetrics] = field(default_factory=list)
    _window: LogWindow = field(default_factory=LogWindow)
    _norms: array[float] = field(default_factory=lambda: array("d"))
    _max_stats: array[float] = field(default_factory=lambda: array("d"))
    _clipped: float = 0.0
    _fraction: float = 0.0
    _above: dict[float, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._above = dict.fromkeys(map(float, self.what_if), 0)

    def row_due(self, step: int) -> bool:
        """Return whether ``step`` gets a row even without an evaluation."""
        return step % self.interval == 0

    def push(self, step: StepMetrics, evaluation: Mapping[str, float] | None = None) -> None:
        """Take the metrics of a step. They move to the host with the next flush.

        Args:
            step: metrics of the step.
            evaluation: further keys for this step, which then gets a row at once, whatever the
                interval. Empty at the end of a run that evaluates nothing.
        """
        self._pending.append(step)
        if evaluation is not None or len(self._pending) >= self.flush_every:
            self.flush(evaluation)

    def flush(self, last: Mapping[str, float] | None = None, together: bool = True) -> None:
        """Move all pending metrics to the host and write their rows.

        Args:
            last: further keys for the newest step, see :meth:`push`.
            together: whether the other ranks flush too. They do not when a run breaks off; metrics
                that need several ranks (the loss, norms of sharded layers) are then left out.
        """
        pending = self._pending
        if not pending:
            return
        shares = [step.layers for step in pending if step.layers is not None]
        norms = None
        if self.layers is not None and shares and (together or not self.layers.spans_ranks):
            norms = self.layers.over_ranks(shares)
        rows, layers = on_host([(step.loss, *step.decision.metrics) for step in pending], norms)
        steps = list(map(values_of, rows))
        own = [step.loss for step in steps]
        losses: Sequence[float | None] = own
        if self.mean_over_data is not None:
            losses = self.mean_over_data(own) if together else [None] * len(own)
        self._pending = []
        first = 0
        for end, step in enumerate(pending, 1):
            newest = end == len(pending)
            further = last if newest else None
            due = further is not None or self.row_due(step.step)
            if due or newest:
                self._count(pending[first:end], losses[first:end], steps[first:end])
                first = end
            each = next(layers, None) if step.layers is not None else None
            if due:
                self._write(step, losses[end - 1], steps[end - 1], each, further or {})
        if together and self.follow is not None:
            self.follow([(step.step, on.norm) for step, on in zip(pending, steps, strict=True)])

    def summary(self) -> dict[str, Any]:
        """Return the metrics of the whole run: every step counts, whatever the interval."""
        steps = len(self._norms)
        return {
            "final": {key: value for key, value in self.last.items() if key != keys.TRAIN_STEP},
            "best": dict(self.best),
            keys.GRAD_NORM: _spread(self._norms),
            keys.CLIP_PEAK: _spread(self._max_stats),
            keys.CLIP_RATIO_TOTAL: self._clipped / steps if steps else 0.0,
            keys.CLIP_FRACTION: self._fraction / steps if steps else 0.0,
            **self._shares(),
            keys.GRAD_NONFINITE: self.nonfinite,
            "steps": steps,
            "samples": self.last.get(keys.TRAIN_SAMPLES, 0),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later rows and the summary depend on.

        Pending metrics are flushed first, so all ranks have to call this after the same step.
        """
        self.flush()
        return {
            "last": dict(self.last),
            "best": dict(self.best),
            "window": asdict(self._window),
            "norms": torch.from_numpy(np.array(self._norms)),
            "max_stats": torch.from_numpy(np.array(self._max_stats)),
            "clipped": self._clipped,
            "fraction": self._fraction,
            "nonfinite": self.nonfinite,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self.last, self.best = dict(state["last"]), dict(state["best"])
        self._window = LogWindow(**state["window"])
        self._norms = array("d", state["norms"].tolist())
        self._max_stats = array("d", state["max_stats"].tolist())
        self._clipped, self._fraction = state["clipped"], state["fraction"]
        self.nonfinite = state["nonfinite"]
        self._above = {t: sum(stat > t for stat in self._max_stats) for t in self._above}

    @property
    def norms(self) -> list[float]:
        """‖G‖ before clipping of every step that has left the device."""
        return self._norms.tolist()

    @property
    def max_stats(self) -> list[float]:
        """``Decision.max_stat`` of the same steps, NaN where a step was skipped."""
        return self._max_stats.tolist()

    def _shares(self) -> dict[str, float]:
        """Share of the steps so far that each threshold of ``what_if`` would have clipped."""
        steps = max(len(self._max_stats), 1)
        return {keys.what_if(t): above / steps for t, above in self._above.items()}

    def _count(
        self,
        steps: Sequence[StepMetrics],
        losses: Sequence[float | None],
        values: Sequence[StepValues],
    ) -> None:
        """Count steps up to the next row, or up to the last one that is known."""
        _, norms, _, _, clipped, fractions, max_stats, _ = zip(*values, strict=True)
        self._norms.extend(norms)
        self._max_stats.extend(max_stats)
        self.nonfinite += len(norms) - sum(map(math.isfinite, norms))
        for threshold in self._above:
            self._above[threshold] += sum(stat > threshold for stat in max_stats)
        # Added one by one: sum() rounds in another way in newer versions of Python.
        self._clipped = reduce(add, clipped, self._clipped)
        self._fraction = reduce(add, fractions, self._fraction)
        window = self._window
        window.steps += len(steps)
        window.clipped = reduce(add, clipped, window.clipped)
        window.norm = reduce(add, norms, window.norm)
        window.norm_max = math.nan if any(map(math.isnan, norms)) else max(window.norm_max, *norms)
        window.seconds = reduce(add, [step.seconds for step in steps], window.seconds)
        if known := [loss for loss in losses if loss is not None and not math.isnan(loss)]:
            self._best(keys.TRAIN_LOSS, min(known))

    def _write(
        self,
        step: StepMetrics,
        loss: float | None,
        values: StepValues,
        layers: list[float] | None,
        further: Mapping[str, float],
    ) -> None:
        """Write the row of a step."""
        row = self._row(step, loss, values)
        if self.layers is not None and layers is not None:
            row.update(zip(self.layers.keys, layers, strict=True))
        for key, value in further.items():
            row[key] = value
            self._best(key, value)
        self.last |= row
        self._window = LogWindow()
        for sink in self.sinks:
            sink.write(row)

    def _row(self, step: StepMetrics, loss: float | None, values: StepValues) -> Row:
        window, before = self._window, int(self.last.get(keys.TRAIN_SAMPLES, 0))
        row: Row = {keys.TRAIN_STEP: step.step}
        if loss is not None:
            row[keys.TRAIN_LOSS] = loss
        row |= {keys.TRAIN_LR: step.lr, keys.TRAIN_SAMPLES: step.samples}
        if step.tokens:
            row[keys.TRAIN_TOKENS] = step.tokens
        row |= {
            keys.GRAD_NORM: values.norm,
            keys.GRAD_NORM_CLIPPED: values.norm_clipped,
            keys.GRAD_NORM_MEAN: window.norm / window.steps,
            keys.GRAD_NORM_MAX: window.norm_max,
            keys.GRAD_NONFINITE: self.nonfinite,
            keys.CLIP_COEF: values.coef,
            keys.CLIP_CLIPPED: int(values.clipped),
            keys.CLIP_FRACTION: values.fraction,
            keys.CLIP_RATIO: window.clipped / window.steps,
            keys.CLIP_RATIO_TOTAL: self._clipped / len(self._norms),
            keys.TIME_STEP: window.seconds / window.steps,
            keys.THROUGHPUT: (step.samples - before) / max(window.seconds, 1e-9),
        }
        if not math.isnan(values.threshold):
            row[keys.CLIP_THRESHOLD] = values.threshold
        row |= self._shares()
        return row

    def _best(self, key: str, value: float) -> None:
        """Keep the lowest loss and the highest accuracy."""
        known = self.best.get(key)
        if math.isnan(value):
            return
        better = max if higher_is_better(key) else min
        self.best[key] = value if known is None else better(known, value)


def _spread(values: array[float]) -> dict[str, float]:
    """Return percentiles, maximum and mean of the finite values; nothing if there are none."""
    every = np.asarray(values, dtype=np.float64)
    finite = every[np.isfinite(every)]
    if not finite.size:
        return {}
    points = np.percentile(finite, (50, 90, 95, 99))
    spread = dict(zip(("p50", "p90", "p95", "p99"), map(float, points), strict=True))
    return spread | {"max": float(finite.max()), "mean": float(finite.mean())}
