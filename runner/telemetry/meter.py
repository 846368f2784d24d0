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
from itertools import islice
from operator import add
from typing import Any

import numpy as np
import torch

from runner.config.objective import higher_is_better
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.gauges import Gauges
from runner.telemetry.layer_norms import LayerNorms
from runner.telemetry.options import Measurements
from runner.telemetry.sinks.sink import Sink
from runner.telemetry.statistics import Statistics
from runner.telemetry.step import (
    StepMetrics,
    StepValues,
    inner_row,
    metrics_of,
    noise_of,
    on_host,
    values_of,
)


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
    """Collects the metrics of steps, writes rows, and keeps what the summary of a run needs."""

    sinks: Sequence[Sink] = ()
    interval: int = 1
    flush_every: int = 50
    mean_over_data: Callable[[list[float]], list[float]] | None = None
    what_if: Sequence[float] = ()
    layers: LayerNorms | Gauges | None = None
    follow: Callable[[Sequence[tuple[int, StepValues]]], None] | None = None
    nonfinite: int = 0
    skipped: int | None = None
    statistics: Statistics = field(default_factory=lambda: Statistics(Measurements()))
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
        """Take the metrics of a step. They move to the host with the next flush."""
        self._pending.append(step)
        if evaluation is not None or len(self._pending) >= self.flush_every:
            self.flush(evaluation)

    def flush(self, last: Mapping[str, float] | None = None, together: bool = True) -> None:
        """Move all pending metrics to the host and write their rows."""
        pending = self._pending
        if not pending:
            return
        shares = [step.layers for step in pending if step.layers is not None]
        norms = None
        if self.layers is not None and shares and (together or not self.layers.spans_ranks):
            norms = self.layers.over_ranks(shares)
        rows, layers = on_host([metrics_of(step) for step in pending], norms)
        steps = list(map(values_of, rows))
        noises = [noise_of(step, row) for step, row in zip(pending, rows, strict=True)]
        losses, noise = self._over_data([step.loss for step in steps], noises, together)
        self._pending = []
        first = 0
        for end, step in enumerate(pending, 1):
            newest = end == len(pending)
            further = last if newest else None
            due = further is not None or self.row_due(step.step)
            if due or newest:
                self._count(pending[first:end], losses[first:end], steps[first:end])
                self._follow(losses[first:end], steps[first:end], noise[first:end])
                first = end
            each = next(layers, None) if step.layers is not None else None
            if due:
                extra: Row = {}
                if self.layers is not None and each is not None:
                    extra |= self.layers.row(each, math.isfinite(steps[end - 1].norm_clipped))
                extra |= inner_row(step, rows[end - 1])
                self._write(step, losses[end - 1], steps[end - 1], extra, further or {})
        if together and self.follow is not None:
            self.follow([(step.step, on) for step, on in zip(pending, steps, strict=True)])

    def _over_data(
        self, losses: list[float], noise: list[Sequence[float] | None], together: bool
    ) -> tuple[Sequence[float | None], Sequence[Sequence[float] | None]]:
        """Average losses, and what noise is estimated from, over the data-parallel ranks."""
        if self.mean_over_data is None:
            return losses, noise
        if not together:
            return [None] * len(losses), [None] * len(noise)
        every = self.mean_over_data([*losses, *(value for each in noise for value in each or ())])
        rest = iter(every[len(losses) :])
        own = [each if each is None else list(islice(rest, len(each))) for each in noise]
        return every[: len(losses)], own

    def _follow(
        self,
        losses: Sequence[float | None],
        values: Sequence[StepValues],
        noise: Sequence[Sequence[float] | None],
    ) -> None:
        for each in zip(values, losses, noise, strict=True):
            self.statistics.count(*each)

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
            **self._skips(),
            **self.statistics.summary(),
            **({} if self.layers is None else self.layers.summary()),
            "steps": steps,
            "samples": self.last.get(keys.TRAIN_SAMPLES, 0),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later rows and the summary depend on."""
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
            "skipped": self.skipped,
            "statistics": self.statistics.state_dict(),
            "layers": {} if self.layers is None else self.layers.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self.last, self.best = dict(state["last"]), dict(state["best"])
        self._window = LogWindow(**state["window"])
        self._norms = array("d", state["norms"].tolist())
        self._max_stats = array("d", state["max_stats"].tolist())
        self._clipped, self._fraction = state["clipped"], state["fraction"]
        self.nonfinite = state["nonfinite"]
        before = state.get("skipped")  # Checkpoints of earlier versions lack it.
        self.skipped = self.skipped if before is None else before
        self._above = {t: sum(stat > t for stat in self._max_stats) for t in self._above}
        if "statistics" in state:
            self.statistics.load_state_dict(state["statistics"])
        if self.layers is not None:
            self.layers.load_state_dict(state.get("layers", {}))

    @property
    def norms(self) -> list[float]:
        """‖G‖ before clipping of every step that has left the device."""
        return self._norms.tolist()

    @property
    def max_stats(self) -> list[float]:
        """``Decision.max_stat`` of the same steps, NaN where a step was skipped."""
        return self._max_stats.tolist()

    def _skips(self) -> dict[str, int]:
        """Number of steps skipped as spikes, where a rule skips any."""
        return {} if self.skipped is None else {keys.CLIP_SKIPPED: self.skipped}

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
        _, norms, _, _, clipped, fractions, max_stats, *_, spikes = zip(*values, strict=True)
        self._norms.extend(norms)
        self._max_stats.extend(max_stats)
        self.nonfinite += len(norms) - sum(map(math.isfinite, norms))
        if self.skipped is not None or any(spikes):
            self.skipped = (self.skipped or 0) + int(sum(spikes))
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
        own: Row,
        further: Mapping[str, float],
    ) -> None:
        """Write the row of a step, with what only some steps or modes have."""
        row = self._row(step, loss, values) | own
        for key, value in further.items():
            row[key] = value
            self._best(key, value)
        # Rows name other parameters each time.
        known = {key: v for key, v in self.last.items() if not key.startswith(keys.LAYER_SHARE)}
        self.last = known | row
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
            **self._skips(),
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
        if not math.isnan(values.norm_scaled):
            row[keys.GRAD_NORM_SCALED] = values.norm_scaled
        return row | self._shares() | self.statistics.row()

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
