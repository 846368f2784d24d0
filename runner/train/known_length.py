"""The length of the data of a run that is known to start, without torch.

``plan`` counts steps by it. Known are runs of the default model on the default data, in one
process; :mod:`runner.train.preflight` checks all others, and a test compares the two.
"""

from __future__ import annotations

import math

from runner.config.check import usual
from runner.config.environment import started_rank
from runner.config.schema import RunConfig
from runner.config.section import Target
from runner.run_folder import keys

_MODEL, _DATA = "runner.models.cnn.DigitsCNN", "runner.data.digits.digits"

_SAMPLES, _CLASSES = 1797, 10
"""Number of handwritten digits, for training and testing, and of their classes."""

_RATES = ("lr", "weight_decay", "eta_min")
"""Arguments of optimizers and schedulers that may have any value above 0."""


def known_length(config: RunConfig) -> int | None:
    """Return the number of training samples of a run that is known to start."""
    samples, clip = _digits(config.data), config.clip
    known = (
        samples is not None
        and config.model.target == _MODEL
        and all(
            _is_usual(name, getattr(config, name)) for name in ("model", "optimizer", "scheduler")
        )
        and started_rank() is None
        and config.plugin.name == "single"
        and config.device != "cuda"
        and config.precision.name == "fp32"
        and config.data.num_workers == 0
        and not (config.data.drop_last and samples < config.data.batch_size)
        and clip.own_target is None
        and config.loss.target is None
        and config.optimizer.target.startswith("torch.")
        and clip.options.get("exclude", "auto") == "auto"
        and clip.options.get("units") is None
        and not (clip.info.nested or clip.info.needs_optimizer or "of" in clip.options)
        and "tok" not in (config.train.max_duration.unit, config.eval.interval.unit)
        and config.sweep.objective == keys.EVAL_LOSS
        and not config.eval.metrics
        and not config.callbacks
        and config.early_stopping.patience is None
    )
    return samples if known else None


def _digits(data: Target) -> int | None:
    """Return the number of digits that are not held out; None for other data or a wrong share."""
    given = data.arguments
    if data.target != _DATA or given.keys() != {"test_fraction", "seed"}:
        return None
    held_out = math.ceil(given["test_fraction"] * _SAMPLES)
    fits = _CLASSES <= held_out <= _SAMPLES - _CLASSES and given["seed"] < 2**32
    return _SAMPLES - held_out if fits else None


def _is_usual(section: str, target: Target) -> bool:
    """Return whether a target has the arguments of its file in ``conf/``; rates may differ."""
    example, given = usual(section, target.target), target.arguments
    return given.keys() | {"_target_"} == example.keys() and all(
        value == example[name] or (name in _RATES and value > 0) for name, value in given.items()
    )
