"""A comparison as plain containers, for ``verify.json`` and for sinks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from runner.config.schema import RunConfig
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.verify.comparison import Compared, ComparedStep, Naive


def outcome(
    config: RunConfig, compared: Sequence[Compared], notes: Iterable[str]
) -> dict[str, Any]:
    """Return the part of ``verify.json`` that is about the comparison."""
    bound = config.verify.bound
    modes = [_mode(one, bound) for one in compared]
    ok = not any(one["failures"] for one in modes)
    outcomes = [outcome for one in compared for outcome in _by_hand(one, bound)]
    causes = dict.fromkeys(cause for one in compared for cause in one.causes)
    raised = next((one.raised for one in outcomes if one.raised is not None), None)
    furthest = max((one.error for one in outcomes), default=None)
    return {
        "ok": ok,
        "error": None,
        "rank": None,
        "max_rel_error": max(one.largest for one in compared),
        "naive": raised or furthest,
        "tolerance": bound,
        "notes": list(notes),
        "causes": [] if ok else list(causes),
        "modes": modes,
    }


def row_of(step: ComparedStep, mode: int, threshold: float | None) -> Row:
    """Return one compared step as a row for sinks; missing values are NaN."""
    by_hand = step.naive
    return {
        "verify/mode": mode,
        keys.TRAIN_STEP: step.step,
        keys.CLIP_THRESHOLD: math.nan if threshold is None else threshold,
        keys.GRAD_NORM: step.plugin.norm,
        keys.CLIP_FRACTION: step.plugin.fraction,
        "verify/norm": step.reference.norm,
        "verify/norm_error": step.errors["norm_error"],
        "verify/gradient_error": step.errors["gradient_error"],
        "verify/fraction": step.reference.fraction,
        "verify/naive": math.nan if by_hand is None or by_hand.norm is None else by_hand.norm,
        "verify/naive_error": math.nan if by_hand is None else by_hand.error,
    }


def _by_hand(one: Compared, bound: float) -> Iterator[Naive]:
    """Yield the naive norms of the steps that begin with equal weights on both sides."""
    for step in one.steps:
        if step.naive is not None:
            yield step.naive
        if not step.largest <= bound:
            return


def _mode(one: Compared, bound: float) -> dict[str, Any]:
    worst = [
        {"name": name, "error": error, "of": what, "placed": one.placed.get(name, "nowhere")}
        for name, error, what in one.worst()
    ]
    return {
        "mode": one.mode,
        "threshold": one.threshold,
        "derived": one.derived,
        "binds": one.binds,
        "max_rel_error": one.largest,
        "weight_error": one.weight_error,
        "failures": list(one.failures(bound)),
        "worst": worst,
        "steps": [_step(*each) for each in zip(one.steps, one.losses, strict=True)],
    }


def _step(step: ComparedStep, loss: float) -> dict[str, Any]:
    return {
        "step": step.step,
        **step.errors,
        "loss": {"plugin": loss, "reference": step.loss},
        "plugin": asdict(step.plugin),
        "reference": asdict(step.reference),
        "naive": None if step.naive is None else asdict(step.naive),
    }
