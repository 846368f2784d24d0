"""The work of one rank in a calibration: a run that is measured and not clipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.calibrate.distribution import warm_up
from runner.clip import ClipMode
from runner.clip import build as build_mode
from runner.clip.mode import NEVER
from runner.clip.tally import HIGHEST, LOWEST, Tally
from runner.config.duration import Duration
from runner.config.schema import RunConfig
from runner.data.dataset import first_sample
from runner.run_folder import keys
from runner.telemetry.sinks.sink import Sink
from runner.train import build
from runner.train.job import make_trainer


def execute(config: RunConfig, sinks: Sequence[Sink]) -> dict[str, Any]:
    """Train for ``calibrate.steps``, or to the end of a shorter run, and return what was
    measured.
    """
    mode, end = unclipped(config), end_of(config)
    tally = mode.tally = Tally(warm_up(end.value, config.calibrate.warmup_steps))
    trainer = make_trainer(config, sinks, mode=mode, max_duration=end, evaluates=False)
    trainer.fit()
    meter = trainer.state.meter
    counts, total = tally.gather(trainer.optimizer.layout)
    parts = {"counts": counts, "total": total, "lowest": LOWEST, "highest": HIGHEST}
    return {
        "parts": parts,
        "norms": meter.norms,
        "peaks": meter.max_stats,
        "loss": meter.last[keys.TRAIN_LOSS],
        "kind": _kind(config),
    }


def unclipped(config: RunConfig) -> ClipMode:
    """Make the clipping mode of ``config`` with a threshold that never clips."""
    clip = config.clip
    threshold = None if clip.threshold is None else NEVER
    return build_mode(
        clip.kind, **{**clip.options, **clip.described.unclipped, "threshold": threshold}
    )


def end_of(config: RunConfig) -> Duration:
    """Return the duration of a calibration: ``calibrate.steps``, or that of a shorter run."""
    data = build.make_data(config.data)
    whole = build.steps_of(config, data)
    steps = config.calibrate.steps
    return Duration(steps if whole is None else min(steps, whole), "ba")


def _kind(config: RunConfig) -> str:
    data = build.make_data(config.data)
    if data.tokens_per_sample is not None:
        return "language"
    sample = first_sample(data.train)
    inputs = sample[0] if isinstance(sample, tuple | list) else None
    return "vision" if getattr(inputs, "ndim", 0) == 3 else "other"
