"""The few figures that a run comes down to.

``summary.json`` covers every step and is taken where it is there. A run that was killed never wrote
one; then the same figures are taken from its rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from runner.config.objective import higher_is_better
from runner.report.run import Run
from runner.report.series import Floats
from runner.run_folder import keys
from runner.run_folder.strict_json import number

PERCENTILES = ("p50", "p90", "p99", "max")


@dataclass(frozen=True)
class RunMetrics:
    """What the table shows of one run; None where the run recorded nothing of the kind.

    Attributes:
        final: last value by metric.
        best: lowest loss, highest accuracy by metric.
        ratio: share of all steps that clipping changed.
        norm: p50, p90, p99 and max of ‖G‖ before clipping, over the finite ones.
        coef: mean over steps of ‖G‖ after clipping ÷ before.
        skipped: steps whose gradient was not finite.
        diverged_at: the step from which the loss stayed lost to the end.
        fraction: mean share clipped of what the mode clips: the steps, the elements or the units.
    """

    final: dict[str, float]
    best: dict[str, float]
    ratio: float | None
    norm: dict[str, float]
    coef: float | None
    skipped: int | None
    diverged_at: int | None
    fraction: float | None = None


def figures(
    run: Run, metrics: list[str], maximized: Mapping[str | None, bool] | None = None
) -> RunMetrics:
    """The figures of a run.

    Args:
        run: as read.
        metrics: the keys to give final and best values of, such as ``eval/loss``.
        maximized: whether a larger value of a metric is the better one, where that is configured.
    """
    final, best = _metrics(run, metrics, maximized or {})
    skipped = number(run.summary.get(keys.GRAD_NONFINITE))
    if skipped is None:
        skipped = _last(run.of(keys.GRAD_NONFINITE).values)
    coef = run.of(keys.CLIP_COEF).finite
    return RunMetrics(
        final=final,
        best=best,
        ratio=_ratio(run),
        fraction=number(run.summary.get(keys.CLIP_FRACTION)),
        norm=_norm(run),
        coef=float(coef.mean()) if len(coef) else None,
        skipped=None if skipped is None or math.isnan(skipped) else int(skipped),
        diverged_at=diverged_at(run),
    )


def diverged_at(run: Run) -> int | None:
    """The step from which the loss stayed lost, or None.

    Lost is a loss that is not finite, or over twice what training began with (median of the first
    rows). One bad step from which the run comes back is no divergence.
    """
    loss = run.of(keys.TRAIN_LOSS)
    if not len(loss):
        return None
    beginning = loss.finite[:10]
    ceiling = 2 * float(np.median(beginning)) if len(beginning) else math.inf
    with np.errstate(invalid="ignore"):
        lost = ~np.isfinite(loss.values)
        if ceiling > 0:
            lost |= loss.values > ceiling
    if not lost[-1]:
        return None
    recovered = np.flatnonzero(~lost)
    first = int(recovered[-1]) + 1 if len(recovered) else 0
    return int(loss.steps[first])


def _metrics(
    run: Run, metrics: list[str], maximized: Mapping[str | None, bool]
) -> tuple[dict[str, float], dict[str, float]]:
    final: dict[str, float] = {}
    best: dict[str, float] = {}
    for key in metrics:
        values = run.of(key).values
        last = _summary(run, "final", key)
        last = _last(values) if last is None else last
        if last is not None:
            final[key] = last
        higher = maximized.get(key, higher_is_better(key))
        # A summary keeps the lowest loss and the highest accuracy.
        top = _summary(run, "best", key) if higher == higher_is_better(key) else None
        if top is None and len(values):
            finite = values[np.isfinite(values)]
            pick = np.max if higher else np.min
            top = float(pick(finite)) if len(finite) else math.nan
        if top is not None:
            best[key] = top
        elif last is not None and math.isnan(last):
            best[key] = math.nan
    return final, best


def _summary(run: Run, part: str, key: str) -> float | None:
    values = run.summary.get(part)
    return number(values.get(key)) if isinstance(values, dict) else None


def _last(values: Floats) -> float | None:
    return float(values[-1]) if len(values) else None


def _ratio(run: Run) -> float | None:
    ratio = number(run.summary.get(keys.CLIP_RATIO_TOTAL))
    if ratio is None:
        ratio = _last(run.of(keys.CLIP_RATIO_TOTAL).values)
    if ratio is None and len(run.of(keys.CLIP_CLIPPED)):
        ratio = float(run.of(keys.CLIP_CLIPPED).values.mean())
    return ratio


def _norm(run: Run) -> dict[str, float]:
    recorded = run.summary.get(keys.GRAD_NORM)
    if isinstance(recorded, dict) and recorded:
        spread = {key: number(recorded.get(key)) for key in PERCENTILES}
        return {key: value for key, value in spread.items() if value is not None}
    norms = run.of(keys.GRAD_NORM).finite
    if not len(norms):
        return {}
    points = np.percentile(norms, (50, 90, 99, 100))
    return dict(zip(PERCENTILES, map(float, points), strict=True))
