"""Metrics of each step, kept on the device and written as rows in batches.

A step leaves 0-dimensional tensors; the host does not wait for those of an accelerator. Every
``flush_every`` steps they travel to the host in one transfer and become rows.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.clip import Decision
from runner.config.notation import higher_is_better
from runner.gradients import Layout, ParamShard, transfer
from runner.gradients.norms import Powers, norms_over_ranks, powers_of
from runner.run_folder import keys
from runner.run_folder.divergence import diverged_from
from runner.run_folder.strict_json import Row
from runner.telemetry.sinks import Sink


class StepMetrics(NamedTuple):
    """Metrics of one optimizer step, where they were computed; None where they are not known.

    ``local_loss`` is the part of this rank: the mean of it over data-parallel ranks, of which one
    for each pipeline has it, is the loss of the step. In one process it is the loss.
    """

    step: int
    local_loss: Tensor | float | None
    decision: Decision
    lr: float | None
    samples: int | None
    tokens: int | None
    seconds: float
    layers: Tensor | None = None
    first: tuple[Tensor | float, float, int] = (math.nan, 0.0, 0)  # see :meth:`estimates`

    def numbers(self) -> dict[str, Tensor | float]:
        """Return what travels to the host: fields of :class:`StepValues`, keys of inner modes."""
        decision = self.decision
        numbers: dict[str, Tensor | float] = {
            "local_loss": math.nan if self.local_loss is None else self.local_loss,
            "norm": decision.norm,
            "norm_clipped": decision.norm_clipped,
            "coef": decision.coef,
            "clipped": decision.clipped,
            "fraction": decision.fraction,
            "max_stat": decision.max_stat,
            "threshold": decision.threshold,
            "norm_scaled": math.nan if decision.norm_scaled is None else decision.norm_scaled,
            "spike": 0.0 if decision.spike is None else decision.spike,
            "first": self.first[0],
        }
        for path, inner in _inner(decision):
            numbers.update(zip(keys.inner(path), inner.metrics, strict=True))
        return numbers

    def estimates(self, values: StepValues) -> tuple[float, float]:
        """Return this rank's estimates of tr(Σ) and |G|², NaN where it measured nothing.

        Σ is the covariance of the gradient of a sample, G its mean. The squared norms of the first
        microbatch, a share f of a step of S samples, and of the step give both without bias
        (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).
        """
        _, share, samples = self.first
        part = values.first
        whole = values.norm * values.norm
        trace = (part - whole) * samples * share / (1 - share)
        square = (whole - share * part) / (1 - share)
        return trace, square


class StepValues(NamedTuple):
    """Metrics of one optimizer step on the host: this rank's loss, and numbers of its decision."""

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

    @classmethod
    def of_numbers(cls, numbers: dict[str, float]) -> tuple[StepValues, Row]:
        """Divide :meth:`StepMetrics.numbers` into the step's values and metrics of inner modes."""
        values = cls(**{name: numbers.pop(name) for name in cls._fields})
        if not math.isfinite(values.norm):  # nothing was clipped
            return values.skipped(), {}
        return values, {key: value for key, value in numbers.items() if not math.isnan(value)}

    def skipped(self) -> StepValues:
        """Return the values of this step if it was not taken."""
        return StepValues(
            local_loss=self.local_loss,
            norm=self.norm,
            norm_clipped=math.nan,
            coef=math.nan,
            clipped=0.0,
            fraction=0.0,
            max_stat=math.nan,
            threshold=self.threshold or math.nan,
        )


class Gauges:
    """Measures norms of parameters, and of their updates, of which each rank has a share.

    The measurements of a step lie in one vector, which stays on the device until metrics travel to
    the host: then the vectors of many steps are combined over ranks.
    """

    def __init__(self, layout: Layout, norm_type: float, per_layer: bool, updates: bool) -> None:
        self.layout = layout
        self._norm_type = norm_type
        self.per_layer = per_layer
        self._updates = updates

    @torch.no_grad()
    def begin(self, powers: Powers | None) -> Callable[[], Tensor]:
        """Measure before a step; the returned function measures after it, and gives [values]."""
        of_gradients: list[Tensor] = []
        if self.per_layer:
            assert powers is not None
            of_gradients.append(powers.of_parameters(self.layout))
        trained = [s for s in self.layout.shards if s.param.requires_grad and s.weight.numel()]
        weights = [shard.weight.clone() for shard in trained] if self._updates else []

        @torch.no_grad()
        def end() -> Tensor:
            if not self._updates:
                return of_gradients[0]
            before = self._squares(trained, weights)
            # Updates are differences of weights, so whatever optimizer made them.
            torch._foreach_sub_(weights, [shard.weight for shard in trained])
            return torch.cat([*of_gradients, self._squares(trained, weights), before])

        return end

    def over_ranks(self, shares: list[Tensor]) -> Tensor:
        """Combine the shares of several steps, [steps, values]; a collective for each step.

        One for all of them could round a step differently where other steps travel with it, as in
        a run that continues.
        """
        return torch.stack([self._step_over_ranks(share) for share in shares])

    def _step_over_ranks(self, share: Tensor) -> Tensor:
        if not self.per_layer:
            return self.layout.sum(share)
        layers = len(self.layout.names)
        if math.isinf(self._norm_type):
            norms = norms_over_ranks(self.layout, share[:layers], self._norm_type)
            return torch.cat([norms, self.layout.sum(share[layers:])])
        total = self.layout.sum(share)
        norms = total[:layers] ** (1.0 / self._norm_type)
        return torch.cat([norms, total[layers:]])

    def row(self, values: Sequence[float]) -> Row:
        """Return the metrics of a step, given its values in the order of :meth:`begin`."""
        names = self.layout.names
        parts = [values[i : i + len(names)] for i in range(0, len(values), len(names))]
        row: Row = {}
        if self.per_layer:
            norms = parts.pop(0)
            row |= {keys.LAYER_NORM + name: n for name, n in zip(names, norms, strict=True)}
        if self._updates:
            updates, weights = parts
            if self.per_layer:
                for name, update, weight in zip(names, updates, weights, strict=True):
                    if weight > 0:
                        row[keys.LAYER_UPDATE + name] = math.sqrt(update / weight)
            whole = math.fsum(weights)
            if whole > 0:
                row[keys.UPDATE_RATIO] = math.sqrt(math.fsum(updates) / whole)
        return row

    def _squares(self, shards: Sequence[ParamShard], tensors: Sequence[Tensor]) -> Tensor:
        powers = powers_of(self.layout, shards, tensors, 2.0, each=True)[1]
        assert powers is not None
        return powers.of_parameters(self.layout)


class HostStep(NamedTuple):
    """Metrics of one step on the host."""

    metrics: StepMetrics
    values: StepValues
    inner: Row  # metrics of inner modes
    gauges: Sequence[float] | None  # values of :class:`Gauges`
    loss: float | None = None  # mean over data-parallel ranks
    noise: tuple[float, float] | None = None  # mean of the estimates over these ranks


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
        norm = values.norm
        self.steps += 1
        self.nonfinite += not math.isfinite(norm)
        self.skipped += bool(values.spike)
        self.clipped += values.clipped
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
        numbers = [metrics.numbers() for metrics in pending]
        rows, gauged = _to_host(numbers, self._gauges_over_ranks(pending, together))
        gauges = iter(gauged)
        steps = []
        for metrics, row in zip(pending, rows, strict=True):
            values, inner = StepValues.of_numbers(row)
            of_gauges = None if metrics.layers is None else next(gauges, None)
            steps.append(HostStep(metrics, values, inner, of_gauges))
        steps = self._with_means(steps, together)
        self._pending = []  # not before: a rank that loses its peers here flushes again alone
        for step in steps:
            self._count(step)
            further = last if step is steps[-1] else None
            if further is not None or self.row_due(step.metrics.step):
                self.write(self._row(step) | step.inner, further or {})
                self._window = Sums()
        if together and self.follow is not None:
            self.follow([(step.metrics.step, step.values) for step in steps])

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
            keys.GRAD_NORM: _spread(self.norms),
            keys.CLIP_PEAK: _spread(self.max_stats),
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
    """Yield the decisions of inner modes at any depth, each with its path of kinds and names."""
    for kind, name, inner in decision.inner:
        yield (*path, (kind, name)), inner
        yield from _inner(inner, (*path, (kind, name)))


def _to_host(
    rows: Sequence[Mapping[str, Tensor | float]], gauged: Tensor | None
) -> tuple[list[dict[str, float]], list[list[float]]]:
    """Return rows of numbers, and the steps of ``gauged``, as floats, in one transfer."""
    tensors = [value for row in rows for value in row.values() if isinstance(value, Tensor)]
    if all(transfer.can_read(tensor.device) for tensor in tensors):
        numbers = [{name: float(value) for name, value in row.items()} for row in rows]
        return numbers, [] if gauged is None else gauged.tolist()
    parts = []
    if tensors:
        wide = transfer.widest(tensors[0].device)
        parts.append(torch.stack([tensor.to(wide) for tensor in tensors]))
    if gauged is not None:
        parts.append(gauged.flatten())
    values = torch.cat(parts).tolist()
    on_host = iter(values[: len(tensors)])
    numbers = []
    for row in rows:
        numbers.append(
            {k: next(on_host) if isinstance(v, Tensor) else float(v) for k, v in row.items()}
        )
    of_gauges = values[len(tensors) :]
    size = gauged.shape[1] if gauged is not None else 1
    return numbers, [of_gauges[i : i + size] for i in range(0, len(of_gauges), size)]
