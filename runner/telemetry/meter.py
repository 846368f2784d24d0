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
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from runner.config.notation import higher_is_better
from runner.run_folder import keys
from runner.run_folder.divergence import diverged_from
from runner.run_folder.strict_json import Row
from runner.telemetry.dominant import Dominant, Leaders
from runner.telemetry.gauges import Gauges
from runner.telemetry.sinks import Sink
from runner.telemetry.step import StepMetrics, on_host
from runner.telemetry.totals import Sums, spread

UPDATES = 128  # rows whose ‖ΔW‖ the next one is compared with
LEAST_UPDATES = 16  # rows before the first comparison


@dataclass
class Meter:
    """Collects the metrics of steps, writes rows, and keeps what the summary of a run needs."""

    sinks: Sequence[Sink] = ()
    interval: int = 1
    flush_every: int = 50
    mean_over_data: Callable[[list[float]], list[float]] | None = None
    what_if: Sequence[float] = ()
    layers: Gauges | None = None
    dominant: Dominant | None = None
    follow: Callable[[Sequence[Row]], None] | None = None  # takes the numbers of each step
    skips: bool = False  # whether a rule skips spikes, which rows then count
    noise: deque[list[float]] | None = None  # :func:`noise_estimates` of the last rows
    updates: deque[float] = field(default_factory=lambda: deque(maxlen=UPDATES))  # of the last rows
    last: Row = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    _pending: list[StepMetrics] = field(default_factory=list)
    _window: Sums = field(default_factory=Sums)
    _total: Sums = field(default_factory=Sums)
    # Of every step: ‖G‖ before clipping, and ``Decision.max_stat``, NaN where it was skipped
    norms: array[float] = field(default_factory=lambda: array("d"))
    max_stats: array[float] = field(default_factory=lambda: array("d"))
    losses: array[float] = field(default_factory=lambda: array("d"))  # of every step
    leaders: Leaders = field(default_factory=Leaders)
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
        steps = self._on_host(pending, together)
        self._add_means(steps, together)
        tops = self._tops(pending, together)
        self._pending = []  # not before: a rank that loses its peers here flushes again alone
        for numbers, top in zip(steps, tops, strict=True):
            self._note_top(numbers, top)
        for numbers in steps:
            self._count(numbers)
            further = last if numbers is steps[-1] else None
            if further is not None or self.row_due(int(numbers[keys.TRAIN_STEP])):
                self.write(self._row(numbers), further or {})
                self._window = Sums()
        if together and self.follow is not None:
            self.follow(steps)

    def _on_host(self, pending: Sequence[StepMetrics], together: bool) -> list[Row]:
        """Move the numbers of steps to the host."""
        steps, rows = on_host(pending, self._gauges_over_ranks(pending, together))
        gauges = iter(rows)
        for metrics, numbers in zip(pending, steps, strict=True):
            if metrics.layers is not None and rows:
                assert self.layers is not None
                numbers |= self.layers.row(next(gauges))
        return steps

    def _gauges_over_ranks(self, pending: Sequence[StepMetrics], together: bool) -> Tensor | None:
        """Return the values of all gauges, [steps, values]; None without gauges."""
        shares = [step.layers for step in pending if step.layers is not None]
        if self.layers is None or not shares:
            return None
        if not together and self.layers.layout.group is not None:
            return None
        return self.layers.over_ranks(shares)

    def _tops(self, pending: Sequence[StepMetrics], together: bool) -> list[dict[str, float]]:
        """Return the largest shares in ‖G‖^p of each step by name, where they are known."""
        parts = [step.powers for step in pending if step.powers is not None]
        alone = (
            not together and self.dominant is not None and self.dominant.layout.group is not None
        )
        if self.dominant is None or not parts or alone:
            return [{} for _ in pending]
        known = iter(self.dominant.over_ranks(parts))
        return [{} if step.powers is None else next(known) for step in pending]

    def _note_top(self, numbers: Row, top: Mapping[str, float]) -> None:
        """Note who leads a step; its row says so if the step was clipped, or skipped as a spike."""
        if self.dominant is None:
            return
        clipped = bool(numbers[keys.CLIP_CLIPPED]) or bool(numbers.get(keys.CLIP_SPIKE))
        self.leaders.add(top, clipped)
        if clipped:
            numbers |= {f"{keys.TOP}{name}": share for name, share in top.items()}

    def _add_means(self, steps: Sequence[Row], together: bool) -> None:
        """Add the loss, and the estimates of the noise, as means over data-parallel ranks.

        A rank that breaks off cannot know them.
        """
        local_keys = list(keys.LOCAL) if self.noise is not None else [keys.LOCAL_LOSS]
        # The numbers of all steps travel together. A rank may lack one that others have.
        local = [numbers.get(key, math.nan) for key in local_keys for numbers in steps]
        if self.mean_over_data is not None:
            if not together:
                return
            local = self.mean_over_data(local)
        means = iter(local)
        for key in local_keys:
            for numbers in steps:
                mean = next(means)
                if key in numbers:
                    numbers[keys.LOCAL[key]] = mean

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
            **self._leaders(),
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
            "norms": torch.tensor(self.norms.tolist(), dtype=torch.float64),
            "max_stats": torch.tensor(self.max_stats.tolist(), dtype=torch.float64),
            "losses": torch.tensor(self.losses.tolist(), dtype=torch.float64),
            "noise": list(self.noise or ()),
            "updates": list(self.updates),
            "leaders": self.leaders.state_dict(),
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
        if "leaders" in state:
            self.leaders.load_state_dict(state["leaders"])
        self._above = {t: sum(stat > t for stat in self.max_stats) for t in self._above}
        self.updates.clear()
        self.updates.extend(state.get("updates", ()))
        if self.noise is not None:
            self.noise.clear()
            self.noise.extend(state.get("noise", ()))

    def _leaders(self) -> dict[str, Any]:
        """Return who led the clipped steps and the spikes, where that was measured."""
        if self.dominant is None:
            return {}
        facts = self.leaders.facts(self.norms)
        return {keys.GRAD_TOP: {"norm_type": self.dominant.norm_type, **facts}}

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

    def _count(self, numbers: Row) -> None:
        max_stat = numbers[keys.CLIP_PEAK]
        self.norms.append(numbers[keys.GRAD_NORM])
        self.max_stats.append(max_stat)
        self._window.add(numbers)
        self._total.add(numbers)
        self._window.seconds += numbers[keys.TIME_STEP]
        for threshold in self._above:
            self._above[threshold] += max_stat > threshold
        if keys.TRAIN_LOSS in numbers:
            self.losses.append(numbers[keys.TRAIN_LOSS])
            self._note_best({keys.TRAIN_LOSS: numbers[keys.TRAIN_LOSS]})
        if self.noise is not None and keys.NOISE_TRACE in numbers:
            estimates = [numbers[keys.NOISE_TRACE], numbers[keys.NOISE_SQUARE]]
            if math.isfinite(sum(estimates)):
                self.noise.append(estimates)

    def write(self, row: Row, further: Mapping[str, float]) -> None:
        row |= further
        self._note_best(further)
        self.last = self.last | row
        for sink in self.sinks:
            sink.write(row)

    def _row(self, numbers: Row) -> Row:
        """Return the row of a step: its numbers, and what all steps since the last row came to."""
        row = {key: numbers[key] for key in (keys.TRAIN_STEP, keys.TRAIN_LOSS) if key in numbers}
        row |= {key: number for key, number in numbers.items() if key not in keys.NOT_IN_ROWS}
        window = self._window
        row[keys.CLIP_CLIPPED] = int(row[keys.CLIP_CLIPPED])
        row[keys.GRAD_NORM_MEAN] = window.norm / window.steps
        row[keys.GRAD_NORM_MAX] = window.norm_max
        row[keys.CLIP_RATIO] = window.clipped / window.steps
        row[keys.CLIP_RATIO_TOTAL] = self._total.clipped / self._total.steps
        row[keys.TIME_STEP] = window.seconds / window.steps
        if keys.TRAIN_SAMPLES in numbers:
            since = numbers[keys.TRAIN_SAMPLES] - int(self.last.get(keys.TRAIN_SAMPLES, 0))
            row[keys.THROUGHPUT] = since / max(window.seconds, 1e-9)
        if keys.UPDATE_NORM in numbers:
            row |= self._compared(numbers[keys.UPDATE_NORM])
        noise_scale = self._noise_scale()
        if noise_scale is not None:
            row[keys.NOISE_SCALE] = noise_scale
        return row | self._so_far()

    def _compared(self, update: float) -> Row:
        """Return how far ‖ΔW‖ lies above the mean of the rows before, in their deviations."""
        before = list(self.updates)
        if math.isfinite(update):
            self.updates.append(update)
        if len(before) < LEAST_UPDATES or not stdev(before):
            return {}
        return {keys.UPDATE_SIGMA: (update - fmean(before)) / stdev(before)}

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
