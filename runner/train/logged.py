"""Which metrics a run logs, and the keys of a configuration that name one of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from runner.clip import Decision
from runner.config.problem import Problem, did_you_mean, near_name, or_list
from runner.config.schema import RunConfig
from runner.data import Data
from runner.run_folder import keys
from runner.telemetry.meter import Meter
from runner.telemetry.step import Numbers, StepMetrics
from runner.train.metrics import name_of


def logged(config: RunConfig, data: Data) -> list[str]:
    """Return the metrics that a run logs, apart from norms of layers."""
    meter = Meter(what_if=config.clip.what_if)
    decision = Decision.untouched(torch.zeros(()), config.clip.threshold)
    numbers: Numbers = {
        keys.LOCAL_LOSS: 0.0,
        keys.TRAIN_LR: 0.0,
        keys.TRAIN_SAMPLES: 1,
        keys.STEP_SAMPLES: 1 if config.accumulation.phases.moves else None,
        keys.TRAIN_TOKENS: data.tokens_per_sample,
        keys.UPDATE_NORM: 0.0 if config.clip.skip.of == "update" else None,
        keys.TIME_STEP: 0.0,
    }
    meter.push(StepMetrics(1, decision, numbers), {})
    names = [*meter.summary()["final"]]
    if config.telemetry.update_ratio:
        names += [keys.UPDATE_RATIO, keys.UPDATE_NORM]
    if config.telemetry.zeros:
        names.append(keys.GRAD_ZEROS)
    names.append(keys.WALL_SECONDS)
    return [*evaluated(config, data), *names]


def evaluated(config: RunConfig, data: Data) -> list[str]:
    """Return the metrics that an evaluation of a run may have; none without held-out data."""
    if data.test is None:
        return []
    metrics = [f"{keys.EVAL}{name_of(metric)}" for metric in config.eval.metrics]
    return [*dict.fromkeys([keys.EVAL_LOSS, keys.EVAL_ACCURACY, *metrics])]


def unlogged_keys(config: RunConfig, data: Data, compared: bool) -> Iterator[Problem]:
    """Yield the keys of a configuration that name a metric which the run does not log.

    ``compared``: the run is one of a sweep, whose runs are compared by ``sweep.objective``.
    """
    objective = config.sweep.objective
    of_evaluations = evaluated(config, data)
    of_layer = config.telemetry.per_layer and objective.startswith(keys.LAYER_NORM)
    # The objective of a single run without held-out data is the default one, which nobody chose.
    chosen = compared or data.test is not None or not objective.startswith(keys.EVAL)
    if chosen and not of_layer and objective not in of_evaluations:
        names = logged(config, data)
        if objective not in names:
            near = near_name(objective, names)
            meant = did_you_mean(objective, names)
            message = f"is not logged by this run{meant} (it logs {', '.join(names)})"
            yield Problem("sweep.objective", objective, message, near)
    watched = config.early_stopping.metric
    if config.early_stopping.patience is not None and watched not in of_evaluations:
        have = or_list(of_evaluations or ["none"])
        message = f"is no metric of evaluations (they have {have})"
        yield Problem("early_stopping.metric", watched, message)
