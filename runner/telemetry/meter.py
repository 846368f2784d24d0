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
from functools import reduce
from itertools import chain, islice
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.clip import Decision, Number, transfer
from runner.config.notation import higher_is_better
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.gauges import Gauges
from runner.telemetry.sinks.sink import Sink
from runner.telemetry.statistics import NoiseShare, Statistics


class StepMetrics(NamedTuple):
    """Metrics of one optimizer step, where they were computed."""

    step: int
    loss: Number
    decision: Decision
    lr: float
    samples: int
    tokens: int
    seconds: float
    layers: Tensor | None = None
    noise: NoiseShare | None = None

    def numbers(self) -> tuple[Number, ...]:
        """Return what travels to the host: :class:`StepValues`, noise, and those of inner modes."""
        scaled = self.decision.norm_scaled
        own = (self.loss, *self.decision.metrics, math.nan if scaled is None else scaled)
        inner = (number for _, each in _inner(self.decision) for number in each.metrics)
        return (*own, self.decision.spike, *(self.noise or ()), *inner)

    def on_host(self, numbers: Sequence[float]) -> tuple[StepValues, Sequence[float] | None, Row]:
        """Return the step's values, its noise, and metrics of inner modes, given its numbers."""
        values = StepValues._make(numbers[: len(StepValues._fields)])
        rest = numbers[len(values) :]
        noise = None if self.noise is None else rest[: len(self.noise)]
        if not math.isfinite(values.norm):  # nothing was clipped
            skipped = Decision.skipped(values.norm, values.threshold)
            return StepValues(*map(float, (values.loss, *skipped.metrics))), noise, {}
        named = (key for path, _ in _inner(self.decision) for key in keys.inner(path))
        inner = zip(named, rest[len(noise or ()) :], strict=True)
        return values, noise, {key: value for key, value in inner if not math.isnan(value)}


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
    layers: Gauges | None = None
    follow: Callable[[Sequence[tuple[int, StepValues]]], None] | None = None
    nonfinite: int = 0
    skipped: int | None = None
    statistics: Statistics = field(default_factory=Statistics)
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
        """Move all pending metrics to the host and write their rows.

        ``last`` are further metrics of the last step. A rank that breaks off flushes without
        ``together``: its rows lack what the other ranks have a share of.
        """
        pending = self._pending
        if not pending:
            return
        shares = [step.layers for step in pending if step.layers is not None]
        gauged = None
        if self.layers is not None and shares and (together or not self.layers.spans_ranks):
            gauged = self.layers.over_ranks(shares)
        rows, layers = _to_host([step.numbers() for step in pending], gauged)
        found = [step.on_host(row) for step, row in zip(pending, rows, strict=True)]
        steps = [values for values, *_ in found]
        losses, noise = self._over_data([s.loss for s in steps], [n for _, n, _ in found], together)
        self._pending = []  # not before: a rank that loses its peers here flushes again alone
        first = 0
        for end, step in enumerate(pending, 1):
            further = last if end == len(pending) else None
            due = further is not None or self.row_due(step.step)
            if due or end == len(pending):
                self._count(pending[first:end], losses[first:end], steps[first:end])
                for values, loss, each in zip(
                    steps[first:end], losses[first:end], noise[first:end], strict=True
                ):
                    self.statistics.count(values.clipped, values.norm, loss, each)
                first = end
            measured = next(layers, None) if step.layers is not None else None
            if due:
                values, _, extra = found[end - 1]
                if self.layers is not None and measured is not None:
                    extra = self.layers.row(measured, math.isfinite(values.norm_clipped)) | extra
                self._write(self._row(step, losses[end - 1], values) | extra, further or {})
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
        every = iter(self.mean_over_data([*losses, *chain.from_iterable(n or () for n in noise)]))
        mean = list(islice(every, len(losses)))
        return mean, [each and list(islice(every, len(each))) for each in noise]

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

    def _write(self, row: Row, further: Mapping[str, float]) -> None:
        """Write the row of a step, with further metrics that have a best value."""
        row |= further
        for key, value in further.items():
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


def _inner(
    decision: Decision, path: tuple[tuple[str, str], ...] = ()
) -> Iterator[tuple[tuple[tuple[str, str], ...], Decision]]:
    """Yield the decisions of modes inside of the clipping mode, each with its path."""
    for kind, name, each in decision.inner:
        yield (*path, (kind, name)), each
        yield from _inner(each, (*path, (kind, name)))


def _to_host(
    rows: list[tuple[Number, ...]], gauged: Tensor | None
) -> tuple[list[list[float]], Iterator[list[float]]]:
    """Return rows of numbers, and the steps of ``gauged``, as floats, in one transfer."""
    if gauged is None and {*map(type, chain.from_iterable(rows))} <= {float, int}:
        return [list(map(float, row)) for row in rows], iter(())
    away = [value for row in rows for value in row if isinstance(value, Tensor)]
    parts = [transfer.on_device(away, away[0].device)] if away else []
    if gauged is not None:
        parts.append(gauged.flatten())
    values = iter(torch.cat(parts).tolist() if parts else [])
    numbers = [[next(values) if isinstance(f, Tensor) else float(f) for f in row] for row in rows]
    measured = [] if gauged is None else [list(islice(values, len(row))) for row in gauged]
    return numbers, iter(measured)
