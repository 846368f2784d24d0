"""Metrics of each step, kept on the device and written as rows in batches.

A step leaves its metrics here as floats on a CPU, and as tensors on an accelerator, for which the
host does not wait. Every ``flush_every`` steps they travel to the host in one transfer and become
rows (one every ``interval`` steps), the same for every sink.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.clip import Decision, Number, transfer
from runner.config.objective import higher_is_better
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.layer_norms import LayerNorms
from runner.telemetry.sinks.sink import Sink


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
        rows, layers = _on_host([(step.loss, *step.decision.metrics) for step in pending], norms)
        own = [row[0] for row in rows]
        losses: Sequence[float | None] = own
        if self.mean_over_data is not None:
            losses = self.mean_over_data(own) if together else [None] * len(own)
        self._pending = []
        for step, loss, row in zip(pending, losses, rows, strict=True):
            each = next(layers, None) if step.layers is not None else None
            further = last if step is pending[-1] else None
            self._take(step, loss, Decision(*row[1:]), each, further)
        if together and self.follow is not None:
            self.follow([(step.step, row[1]) for step, row in zip(pending, rows, strict=True)])

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

    def _take(
        self,
        step: StepMetrics,
        loss: float | None,
        decision: Decision,
        layers: list[float] | None,
        further: Mapping[str, float] | None,
    ) -> None:
        if not math.isfinite(decision.norm):
            # An accelerator that decides for itself reports what clipping would have made of it.
            decision = Decision.skipped(decision.norm, decision.threshold)
            self.nonfinite += 1
        norm, clipped = float(decision.norm), float(decision.clipped)
        self._norms.append(norm)
        max_stat = float(decision.max_stat)
        self._max_stats.append(max_stat)
        for threshold in self._above:
            self._above[threshold] += max_stat > threshold
        self._clipped += clipped
        self._fraction += float(decision.fraction)
        window = self._window
        window.steps += 1
        window.clipped += clipped
        window.norm += norm
        window.norm_max = norm if math.isnan(norm) else max(window.norm_max, norm)
        window.seconds += step.seconds
        if loss is not None:
            self._best(keys.TRAIN_LOSS, loss)
        if further is None and not self.row_due(step.step):
            return
        row = self._row(step, loss, decision)
        if self.layers is not None and layers is not None:
            row.update(zip(self.layers.keys, layers, strict=True))
        for key, value in (further or {}).items():
            row[key] = value
            self._best(key, value)
        self.last |= row
        self._window = LogWindow()
        for sink in self.sinks:
            sink.write(row)

    def _row(self, step: StepMetrics, loss: float | None, decision: Decision) -> Row:
        window, before = self._window, int(self.last.get(keys.TRAIN_SAMPLES, 0))
        row: Row = {keys.TRAIN_STEP: step.step}
        if loss is not None:
            row[keys.TRAIN_LOSS] = loss
        row |= {keys.TRAIN_LR: step.lr, keys.TRAIN_SAMPLES: step.samples}
        if step.tokens:
            row[keys.TRAIN_TOKENS] = step.tokens
        row |= {
            keys.GRAD_NORM: float(decision.norm),
            keys.GRAD_NORM_CLIPPED: float(decision.norm_clipped),
            keys.GRAD_NORM_MEAN: window.norm / window.steps,
            keys.GRAD_NORM_MAX: window.norm_max,
            keys.GRAD_NONFINITE: self.nonfinite,
            keys.CLIP_COEF: float(decision.coef),
            keys.CLIP_CLIPPED: int(decision.clipped),
            keys.CLIP_FRACTION: float(decision.fraction),
            keys.CLIP_RATIO: window.clipped / window.steps,
            keys.CLIP_RATIO_TOTAL: self._clipped / len(self._norms),
            keys.TIME_STEP: window.seconds / window.steps,
            keys.THROUGHPUT: (step.samples - before) / max(window.seconds, 1e-9),
        }
        if not math.isnan(decision.threshold):
            row[keys.CLIP_THRESHOLD] = float(decision.threshold)
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


def _on_host(
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
