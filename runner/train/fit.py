"""Check before a run that its model takes its data, and that it logs the objective of its sweep.

Two samples go through the model on torch's meta device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from runner.booster.batch import BatchError, mapped, targets_of, tensors
from runner.booster.loss import WindowLoss, logits_of, returned_loss
from runner.clip import Decision
from runner.config.problem import DataMismatch, Problem, did_you_mean, nearest_name, or_list
from runner.config.schema import RunConfig
from runner.data import Data, DataUnavailable, collate_pairs
from runner.data.dataset import first_sample, length_of
from runner.run_folder import keys
from runner.telemetry.gauges import Measurements
from runner.telemetry.meter import Meter, StepMetrics
from runner.telemetry.statistics import Statistics
from runner.train import build
from runner.train.evaluation import EvalMetrics, MetricError, name_of
from runner.train.refused import first_line


def check(config: RunConfig, model: nn.Module, data: Data, compared: bool = True) -> list[Problem]:
    """Return what is wrong with model and data together, or with the objective of the sweep."""
    if length_of(data.train) == 0:
        return []
    shape, outputs = "of unknown shape", None
    graded: bool | None = None
    try:
        sample = first_sample(data.train)
        samples = collate_pairs([sample, sample])
        criterion = build.make_criterion(config.loss)
        loss = WindowLoss(model, criterion)
        loss.items(samples)
        shape = _shape(samples)
        batch = mapped(samples, lambda t: t.to("meta"))
        if isinstance(criterion, nn.Module):
            criterion.to("meta")
        with torch.device("meta"), torch.no_grad():
            outputs = loss.forward(model, batch)
            if problem := _numbers(config, loss, outputs, samples):
                return [problem]
            loss.sum(outputs, batch, items=1)
        graded = loss.classified(outputs, samples) is not None
        if problem := _metrics(config, loss, outputs, samples):
            return [problem]
    except (BatchError, DataUnavailable) as error:
        return [Problem("data._target_", config.data.target, str(error))]
    except Exception as error:
        if not about_meta(error):
            if outputs is not None and config.loss.target is not None:
                return [_refused_by_criterion(config, outputs, samples, error)]
            message = f"does not take a sample of {config.data.target} ({shape}): "
            message += first_line(error)
            return [DataMismatch("model._target_", config.model.target, message)]
    watched = [*_watched(config, data, graded)]
    if data.test is None and not compared and config.sweep.objective.startswith(keys.EVAL):
        return watched  # The objective is the default one: only a sweep can choose another.
    return [*_objective(config, model, data, graded), *watched]


def _watched(config: RunConfig, data: Data, graded: bool | None) -> Iterator[Problem]:
    """Yield a problem if evaluations do not have ``early_stopping.metric``."""
    key, on = config.early_stopping.metric, config.early_stopping.patience is not None
    names = [name for name in logged(config, data, graded) if name.startswith(keys.EVAL)]
    if on and key not in names:
        near = did_you_mean(key, names)
        message = f"is no metric of evaluations{near} (they have {or_list(names or ['none'])})"
        yield Problem("early_stopping.metric", key, message)


def _metrics(config: RunConfig, loss: WindowLoss, outputs: Any, samples: object) -> Problem | None:
    """Return a problem if a further metric does not fit, or its best value is unclear."""
    if not config.eval.metrics:
        return None
    try:
        higher = EvalMetrics(config.eval.metrics, loss).try_on(logits_of(outputs), samples)
    except MetricError as error:
        return Problem("eval.metrics", error.asked, str(error))
    objective = config.sweep.objective.removeprefix(keys.EVAL)
    if config.sweep.direction is None and higher.get(objective) not in (
        None,
        config.sweep.maximizes,
    ):
        wanted = "maximize" if higher[objective] else "minimize"
        return Problem("sweep.direction", None, f"must be {wanted} with {config.sweep.objective}")
    return None


def _numbers(
    config: RunConfig, loss: WindowLoss, outputs: object, samples: object
) -> Problem | None:
    """Return a problem if cross entropy would compare numbers, which are no probabilities."""
    targets = targets_of(samples)
    if config.loss.target is not None or loss.takes_batch or returned_loss(outputs) is not None:
        return None
    if targets is None or not targets.is_floating_point():
        return None
    sums = targets.sum(-1)
    if targets.shape[-1] > 1 and bool((targets >= 0).all() and (sums - 1).abs().max() < 1e-3):
        return None
    message = (
        "must name a criterion, such as torch.nn.MSELoss: the targets are numbers, and cross "
        "entropy takes classes or their probabilities"
    )
    return Problem("loss._target_", None, message)


def _refused_by_criterion(
    config: RunConfig, outputs: object, samples: object, error: Exception
) -> Problem:
    """Describe that the criterion does not take the outputs of the model and the targets."""
    got = f"outputs {_sizes(outputs)} and targets {_sizes(targets_of(samples))}"
    message = f"does not take {got}: {first_line(error)}"
    return Problem("loss._target_", config.loss.target, message)


def _sizes(structure: object) -> str:
    """Describe the shapes of tensors; B stands for the number of samples."""
    shapes = [["B", *map(str, leaf.shape[1:])] for leaf in tensors(structure) if leaf.ndim]
    return ", ".join(f"[{', '.join(shape)}]" for shape in shapes) or "without dimensions"


def _shape(samples: object) -> str:
    """Describe shape and type of the inputs of one sample."""
    for leaf in tensors(samples):
        if leaf.ndim:
            size = "x".join(map(str, leaf.shape[1:])) or "one number"
            return f"{size}, {str(leaf.dtype).removeprefix('torch.')}"
    return "of unknown shape"


def _objective(
    config: RunConfig, model: nn.Module, data: Data, graded: bool | None
) -> list[Problem]:
    """Return a problem if the run does not log ``sweep.objective``."""
    key, names = config.sweep.objective, logged(config, data, graded)
    layers = [keys.layer_norm(name) for name, _ in model.named_parameters()]
    if key in names or (config.telemetry.per_layer and key in layers):
        return []
    near = nearest_name(key, names)
    mean = "" if near is None else f"; did you mean {near}?"
    if data.test is None and key.startswith(keys.EVAL):
        mean = f", which has no held-out data; use sweep.objective={keys.TRAIN_LOSS}"
    message = f"is not logged by this run{mean} (it logs {', '.join(names)})"
    return [Problem("sweep.objective", key, message)]


def logged(config: RunConfig, data: Data, graded: bool | None) -> list[str]:
    """Return the metrics that a run logs, apart from norms of layers."""
    evaluation = [keys.EVAL_LOSS] if graded is False else [keys.EVAL_LOSS, keys.EVAL_ACCURACY]
    evaluation += [f"{keys.EVAL}{name_of(one)}" for one in config.eval.metrics]
    evaluation = [] if data.test is None else list(dict.fromkeys(evaluation))
    meter = Meter(what_if=config.clip.what_if)
    measured = Measurements.of(config.telemetry)
    meter.statistics = Statistics(measured)
    decision = Decision.untouched(0.0, config.clip.threshold, 0.0)
    meter.push(StepMetrics(1, 0.0, decision, 0.0, 1, data.tokens_per_sample or 0, 0.0), {})
    further = {keys.UPDATE_RATIO: measured.update_ratio, keys.CLIP_COSINE: measured.clip_cosine}
    logs = [*meter.summary()["final"], *(key for key, asked in further.items() if asked)]
    return [*evaluation, *logs, keys.WALL_SECONDS]


def about_meta(error: Exception) -> bool:
    """Return whether an error comes from the meta device, which lacks some operations."""
    # Only some are of a type of their own: item() raises a RuntimeError, numpy() a TypeError.
    return isinstance(error, NotImplementedError) or bool(re.search(r"\bmeta\b", str(error), re.I))
