"""Reduce a run to the metrics that the table shows.

``summary.json`` covers every step and is used if it is there. A run that was killed never wrote it;
its metrics are computed from its rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runner.config.objective import higher_is_better
from runner.report.run import Run
from runner.report.series import drawn
from runner.run_folder import keys

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass(frozen=True)
class RunMetrics:
    """Metrics of one run; None where the run recorded nothing."""

    final: dict[str, float]
    best: dict[str, float]
    ratio: float | None
    norm: dict[str, float]
    coef: float | None
    skipped: int | None
    diverged_at: int | None
    fraction: float | None = None
    spikes: int | None = None


def measure(
    run: Run, metrics: Sequence[str], maximized: Mapping[str | None, bool] | None = None
) -> RunMetrics:
    """Return the metrics of a run."""
    ratio = _recorded(run, run.summary, keys.CLIP_RATIO_TOTAL)
    coef, clipped = run.of(keys.CLIP_COEF).finite, run.of(keys.CLIP_CLIPPED)
    if ratio is None and len(clipped):
        ratio = float(clipped.values.mean())
    higher = {key: higher_is_better(key) for key in metrics} | dict(maximized or {})
    final = {key: _recorded(run, run.summary.get("final"), key) for key in metrics}
    best = {key: _best(run, key, higher[key], final[key]) for key in metrics}
    return RunMetrics(
        final={key: value for key, value in final.items() if value is not None},
        best={key: value for key, value in best.items() if value is not None},
        ratio=ratio,
        fraction=drawn(run.summary.get(keys.CLIP_FRACTION)),
        norm=_norm(run),
        coef=float(coef.mean()) if len(coef) else None,
        skipped=_count(run, keys.GRAD_NONFINITE),
        diverged_at=diverged_at(run),
        spikes=_count(run, keys.CLIP_SKIPPED),
    )


def diverged_at(run: Run) -> int | None:
    """Return the step from which the loss stayed lost until the end, or None."""
    loss = run.of(keys.TRAIN_LOSS)
    if not len(loss):
        return None
    beginning = loss.finite[:10]
    ceiling = 2 * float(np.median(beginning)) if len(beginning) else math.inf
    with np.errstate(invalid="ignore"):
        lost = ~np.isfinite(loss.values)
        if ceiling > 0:
            lost |= loss.values > ceiling
    # A run that finished may have lost the batch of its last step alone.
    alone = run.state == "finished" and len(lost) > 10 and not lost[-2]
    if not lost[-1] or alone:
        return None
    recovered = np.flatnonzero(~lost)
    first = int(recovered[-1]) + 1 if len(recovered) else 0
    return int(loss.steps[first])


def _best(run: Run, key: str, higher: bool, final: float | None) -> float | None:
    # The summary keeps the best value of the metric's usual direction.
    recorded = run.summary.get("best") if higher == higher_is_better(key) else None
    best = drawn(recorded.get(key)) if isinstance(recorded, dict) else None
    if best is not None:
        return best
    finite = run.of(key).finite
    if len(finite):
        return float(finite.max() if higher else finite.min())
    return math.nan if len(run.of(key)) or (final is not None and math.isnan(final)) else None


def _count(run: Run, key: str) -> int | None:
    total = _recorded(run, run.summary, key)
    return None if total is None or not math.isfinite(total) else int(total)


def _recorded(run: Run, record: object, key: str) -> float | None:
    """Return the number of a record if it has one, else the last one of the rows."""
    value = drawn(record.get(key)) if isinstance(record, Mapping) else None
    rows = run.of(key).values
    return float(rows[-1]) if value is None and len(rows) else value


def _norm(run: Run) -> dict[str, float]:
    recorded = run.summary.get(keys.GRAD_NORM)
    if isinstance(recorded, dict) and recorded:
        spread = {key: drawn(recorded.get(key)) for key in PERCENTILES}
        return {key: value for key, value in spread.items() if value is not None}
    norms = run.of(keys.GRAD_NORM).finite
    if not len(norms):
        return {}
    points = np.percentile(norms, list(PERCENTILES.values()))
    return dict(zip(PERCENTILES, map(float, points), strict=True))
