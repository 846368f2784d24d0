"""Metrics of each step, kept on the device and written as rows in batches.

A step leaves floats on a CPU, and tensors on an accelerator, for which the host does not wait.
Every ``flush_every`` steps they travel to the host in one transfer and become rows.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.clip import Decision, Layout, Number, ParamShard, transfer
from runner.clip.norms import Powers, combined_norms, powers_of
from runner.config.notation import higher_is_better
from runner.run_folder import keys
from runner.run_folder.strict_json import Row
from runner.telemetry.sinks import Sink


class StepMetrics(NamedTuple):
    """Metrics of one optimizer step, where they were computed; None where they are not known.

    ``local_loss`` is the part of this rank: the mean of it over data-parallel ranks, of which one
    for each pipeline has it, is the loss of the step. In one process it is the loss.
    """

    step: int
    local_loss: Number | None
    decision: Decision
    lr: float | None
    samples: int | None
    tokens: int | None
    seconds: float
    layers: Tensor | None = None
    first: tuple[Number, float, int] = (math.nan, 0.0, 0)  # see :meth:`estimates`

    def numbers(self) -> tuple[Number, ...]:
        """Return what travels to the host: :class:`StepValues`, and those of inner modes."""
        scaled = self.decision.norm_scaled
        loss = math.nan if self.local_loss is None else self.local_loss
        own = (loss, *self.decision.metrics, math.nan if scaled is None else scaled)
        inner = (number for _, each in _inner(self.decision) for number in each.metrics)
        return (*own, self.decision.spike, self.first[0], *inner)

    def estimates(self, values: StepValues) -> tuple[float, float]:
        """Return what this rank makes of tr(Σ) and |G|², NaN where it measured nothing.

        Σ is the covariance of the gradient of a sample, G its mean. The squared norms of the first
        microbatch, a share f of a step of S samples, and of the step give both without bias
        (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).
        """
        (_, f, samples), small, whole = self.first, values.first, values.norm * values.norm
        return (small - whole) * samples * f / (1 - f), (whole - f * small) / (1 - f)

    def on_host(self, numbers: Sequence[float]) -> tuple[StepValues, Row]:
        """Return the step's values, and metrics of inner modes, given its numbers."""
        values = StepValues._make(numbers[: len(StepValues._fields)])
        if not math.isfinite(values.norm):  # nothing was clipped
            skipped = Decision.skipped(values.norm, values.threshold)
            return StepValues(*map(float, (values.local_loss, *skipped.metrics))), {}
        named = (key for path, _ in _inner(self.decision) for key in keys.inner(path))
        inner = zip(named, numbers[len(values) :], strict=True)
        return values, {key: value for key, value in inner if not math.isnan(value)}


class StepValues(NamedTuple):
    """Metrics of one optimizer step on the host: this rank's loss, and those of its decision."""

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


class Gauges:
    """Measures norms of parameters, and of their updates, of which each rank has a share.

    All of it lies in one vector of a step, which stays on the device. The vectors of many steps are
    combined over ranks in one collective, when metrics travel to the host.
    """

    def __init__(self, layout: Layout, norm_type: float, per_layer: bool, updates: bool) -> None:
        self.layout, self._norm_type = layout, norm_type
        self.per_layer, self._updates = per_layer, updates

    @torch.no_grad()
    def begin(self, powers: Powers | None) -> Callable[[], Tensor]:
        """Measure before a step; what is returned gives the [values] of this rank after it."""
        found: list[Tensor] = []
        if self.per_layer:
            assert powers is not None
            found.append(powers.of_parameters(self.layout))
        trained = [s for s in self.layout.shards if s.param.requires_grad and s.weight.numel()]
        weights = [shard.weight.clone() for shard in trained] if self._updates else []

        @torch.no_grad()
        def end() -> Tensor:
            if not self._updates:
                return found[0]
            before = self._squares(trained, weights)
            # Updates are differences of weights, so whatever optimizer made them.
            torch._foreach_sub_(weights, [shard.weight for shard in trained])
            return torch.cat([*found, self._squares(trained, weights), before])

        return end

    def over_ranks(self, shares: list[Tensor]) -> Tensor:
        """Combine the shares of several steps, [steps, values]; one collective."""
        stacked = torch.stack(shares)
        every = self.layout.rows_of_ranks(stacked.flatten()).view(-1, *stacked.shape)
        total = every.sum(0)
        if self.per_layer:
            layers = slice(len(self.layout.names))
            total[:, layers] = combined_norms(every[..., layers], self._norm_type)
        return total

    def row(self, values: Sequence[float]) -> Row:
        names, row = self.layout.names, Row()
        parts = [values[at : at + len(names)] for at in range(0, len(values), len(names))]
        if self.per_layer:
            row = {keys.LAYER_NORM + name: n for name, n in zip(names, parts.pop(0), strict=True)}
        if self._updates:
            updates, weights = parts
            each = zip(names, updates, weights, strict=True) if self.per_layer else ()
            row |= {keys.LAYER_UPDATE + name: math.sqrt(u / w) for name, u, w in each if w > 0}
            if (size := math.fsum(weights)) > 0:
                row[keys.UPDATE_RATIO] = math.sqrt(math.fsum(updates) / size)
        return row

    def _squares(self, shards: Sequence[ParamShard], tensors: Sequence[Tensor]) -> Tensor:
        powers = powers_of(shards, tensors, 2.0, each=True)[1]
        assert powers is not None
        return powers.of_parameters(self.layout)


@dataclass
class Sums:
    steps: int = 0
    nonfinite: int = 0
    skipped: int = 0  # as spikes
    clipped: float = 0.0
    fraction: float = 0.0
    norm: float = 0.0
    norm_max: float = 0.0
    seconds: float = 0.0  # of the window alone

    def add(self, values: StepValues) -> None:
        norm, clipped = values.norm, values.clipped
        self.steps += 1
        self.nonfinite += not math.isfinite(norm)
        self.skipped += bool(values.spike)
        self.clipped += clipped
        self.fraction += values.fraction
        self.norm += norm
        self.norm_max = norm if math.isnan(norm) else max(self.norm_max, norm)  # NaN stays


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
    _above: dict[float, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._above = dict.fromkeys(map(float, self.what_if), 0)

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
        shares = [step.layers for step in pending if step.layers is not None]
        gauged = None
        if self.layers is not None and shares and (together or self.layers.layout.group is None):
            gauged = self.layers.over_ranks(shares)
        rows, layers = _to_host([step.numbers() for step in pending], gauged)
        found = [step.on_host(row) for step, row in zip(pending, rows, strict=True)]
        means: list[Any] = [values.local_loss for values, _ in found]
        if self.noise is not None:
            pairs = zip(pending, found, strict=True)
            means += chain.from_iterable(step.estimates(values) for step, (values, _) in pairs)
        if self.mean_over_data is not None:
            means = self.mean_over_data(means) if together else [None] * len(means)
        losses, noise = means[: len(pending)], iter(means[len(pending) :])
        self._pending = []  # not before: a rank that loses its peers here flushes again alone
        for step, (values, inner), mean in zip(pending, found, losses, strict=True):
            loss = None if step.local_loss is None else mean
            self._count(step, values, loss)
            if self.noise is not None and (pair := [next(noise), next(noise)])[0] is not None:
                self.noise.extend([pair] if math.isfinite(sum(pair)) else [])
            measured = next(layers, None) if step.layers is not None else None
            further = last if step is pending[-1] else None
            if further is not None or self.row_due(step.step):
                row = self._row(step, loss, values)
                if self.layers is not None and measured is not None:
                    row |= self.layers.row(measured)
                self.write(row | inner, further or {})
                self._window = Sums()
        if together and self.follow is not None:
            self.follow([(s.step, values) for s, (values, _) in zip(pending, found, strict=True)])

    def summary(self) -> dict[str, Any]:
        total, steps = self._total, max(self._total.steps, 1)
        return {
            "final": {key: value for key, value in self.last.items() if key != keys.TRAIN_STEP},
            "best": dict(self.best),
            keys.GRAD_NORM: _spread(self.norms),
            keys.CLIP_PEAK: _spread(self.max_stats),
            keys.CLIP_RATIO_TOTAL: total.clipped / steps,
            keys.CLIP_FRACTION: total.fraction / steps,
            **self._so_far(),
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
            "noise": list(self.noise or ()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending = []  # of steps that are left
        self.last, self.best = dict(state["last"]), dict(state["best"])
        self._window, self._total = Sums(**state["window"]), Sums(**state["total"])
        self.norms = array("d", state["norms"].tolist())
        self.max_stats = array("d", state["max_stats"].tolist())
        self._above = {t: sum(stat > t for stat in self.max_stats) for t in self._above}
        if self.noise is not None:
            self.noise.extend(state.get("noise", ()))

    def _so_far(self) -> dict[str, float]:
        total, steps = self._total, max(self._total.steps, 1)
        found: dict[str, float] = {keys.GRAD_NONFINITE: total.nonfinite}
        if self.skips or total.skipped:
            found[keys.CLIP_SKIPPED] = total.skipped
        return found | {f"{keys.WHAT_IF}{t}": above / steps for t, above in self._above.items()}

    def _count(self, step: StepMetrics, values: StepValues, loss: float | None) -> None:
        self.norms.append(values.norm)
        self.max_stats.append(values.max_stat)
        for sums in (self._window, self._total):
            sums.add(values)
        self._window.seconds += step.seconds
        for threshold in self._above:
            self._above[threshold] += values.max_stat > threshold
        if loss is not None:
            self._note_best({keys.TRAIN_LOSS: loss})

    def write(self, row: Row, further: Mapping[str, float]) -> None:
        row |= further
        self._note_best(further)
        self.last = self.last | row
        for sink in self.sinks:
            sink.write(row)

    def _row(self, step: StepMetrics, loss: float | None, values: StepValues) -> Row:
        window, total, samples = self._window, self._total, step.samples
        since = 0 if samples is None else samples - int(self.last.get(keys.TRAIN_SAMPLES, 0))
        scaled, noise = values.norm_scaled, self.noise or ()
        of_mean = math.fsum(square for _, square in noise)
        row: dict[str, float | None] = {
            keys.TRAIN_STEP: step.step,
            keys.TRAIN_LOSS: loss,
            keys.TRAIN_LR: step.lr,
            keys.TRAIN_SAMPLES: samples,
            keys.TRAIN_TOKENS: step.tokens or None,
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
            keys.NOISE_SCALE: math.fsum(one for one, _ in noise) / of_mean if of_mean > 0 else None,
        }
        return {key: value for key, value in row.items() if value is not None} | self._so_far()

    def _note_best(self, found: Mapping[str, float]) -> None:
        for key, value in found.items():
            if not math.isnan(value):
                better = max if higher_is_better(key) else min
                self.best[key] = better(self.best.get(key, value), value)


def _spread(values: array[float]) -> dict[str, float]:
    every = np.asarray(values, dtype=np.float64)
    finite = every[np.isfinite(every)]
    if not finite.size:
        return {}
    spread = {f"p{share}": float(np.percentile(finite, share)) for share in (50, 90, 95, 99)}
    return spread | {"max": float(finite.max()), "mean": float(finite.mean())}


def _inner(
    decision: Decision, path: tuple[tuple[str, str], ...] = ()
) -> Iterator[tuple[tuple[tuple[str, str], ...], Decision]]:
    for kind, name, each in decision.inner:
        yield (*path, (kind, name)), each
        yield from _inner(each, (*path, (kind, name)))


def _to_host(
    rows: list[tuple[Number, ...]], gauged: Tensor | None
) -> tuple[list[list[float]], Iterator[list[float]]]:
    """Return rows of numbers, and the steps of ``gauged``, as floats, in one transfer."""
    if gauged is None and Tensor not in {*map(type, chain.from_iterable(rows))}:
        return [list(map(float, row)) for row in rows], iter([])
    away = [value for row in rows for value in row if isinstance(value, Tensor)]
    parts = [transfer.on_device(away, away[0].device)] if away else []
    parts += [] if gauged is None else [gauged.flatten()]
    values = iter(torch.cat(parts).tolist())
    numbers = [[next(values) if isinstance(f, Tensor) else float(f) for f in row] for row in rows]
    measured = [] if gauged is None else [list(islice(values, len(row))) for row in gauged]
    return numbers, iter(measured)
