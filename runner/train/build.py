"""Build the objects of a run from its checked configuration, by the ``_target_`` of each.

Arguments that a configuration cannot hold are added: parameters, the optimizer, ``total_steps`` and
``fused``.
"""

from __future__ import annotations

import inspect
import json
import math
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn
from torch.optim import Optimizer

from runner.booster import Plugin
from runner.booster.loss import Criterion
from runner.booster.plugin import PLUGINS
from runner.clip.units import head_weights
from runner.config import plugin_section as sizes
from runner.config.environment import started_rank
from runner.config.notation import Duration
from runner.config.problem import did_you_mean
from runner.config.schema import DataSection, LossSection, RunConfig
from runner.config.section import Target
from runner.data import Data, DataUnavailable
from runner.data.dataset import length_of
from runner.train.callbacks import EarlyStopping, Probe

T = TypeVar("T")


class TargetError(ValueError):
    """A ``_target_`` that does not exist, or that rejects its arguments."""


def device_of(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is this rank's GPU if there is one."""
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    started = started_rank()
    local_rank = 0 if started is None else started.local_rank or 0
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def maker(target: Target) -> partial[Any]:
    """Return the class or function that ``target`` names, with its arguments bound."""
    try:
        made = instantiate(target.mapping(), _partial_=True, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        module, _, name = target.target.rpartition(".")
        with suppress(ImportError):
            names = vars(import_module(module))
            if name not in names:
                reason = f"{module} has no {name}{did_you_mean(name, names)}"
        raise TargetError(f"{target.target}: {reason}") from error
    assert isinstance(made, partial)
    return made


def make_data(config: DataSection) -> Data:
    """Make the data, once for each configuration: the preflight check and the run share it."""
    return _data(json.dumps(config.model_dump(by_alias=True), sort_keys=True))


@lru_cache(maxsize=2)
def _data(section: str) -> Data:
    config, parts = DataSection.model_validate_json(section), {}
    for name, part in config.parts.items():
        try:
            parts[name] = maker(part)()
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            message = f"data.{name}: {part.target} cannot be made: {reason}"
            raise DataUnavailable(message) from error
    data = _require(Data, maker(config)(**parts), config)
    for dataset in (data.train, data.test):
        if dataset is not None:
            length_of(dataset)  # all but streams need one
    return data


def _require(kind: type[T], made: Any, target: Target) -> T:
    if not isinstance(made, kind):
        returned = type(made).__name__
        raise TargetError(f"{target.target} returned {returned}, no {kind.__name__}")
    return made


def make_criterion(config: LossSection) -> Criterion | None:
    if config.target is None:
        return None
    made = maker(config)
    return made() if isinstance(made.func, type) else made


def make_optimizers(target: Target, model: nn.Module) -> list[Optimizer]:
    """Make the optimizers of a run, in their fused form where they have one."""
    make, several = maker(target), takes(maker(target), "model")
    if several:
        given = {"model": model, "heads": head_weights(model)}
        make = partial(make, **{key: value for key, value in given.items() if takes(make, key)})
    else:
        make = partial(make, list(model.parameters()))
    made = None
    if takes(make, "fused"):
        with suppress(RuntimeError):  # Not supported on this device or with these options.
            made = make(fused=True)
    made = make() if made is None else made
    listed = list(made) if several and isinstance(made, list | tuple) else [made]
    return [_require(Optimizer, each, target) for each in listed or [made]]


def takes(make: partial[Any], argument: str) -> bool:
    """Return whether ``make`` can be given ``argument``, which the configuration did not."""
    try:
        return argument in inspect.signature(make.func).parameters.keys() - make.keywords.keys()
    except ValueError:  # the signature of a compiled function may be unknown
        return False


def make_scheduler(target: Target, optimizer: Optimizer, steps: int | None) -> Any:
    """Make the scheduler of ``optimizer``, with ``steps`` as its ``total_steps`` if it has one."""
    make = maker(target)
    if not takes(make, "total_steps"):
        return make(optimizer)
    if steps is None:
        known = "give train.max_duration in ba or sp (a stream has epochs of unknown length)"
        raise TargetError(f"{target.target} needs the number of steps: {known}")
    return make(optimizer, total_steps=steps)


def make_callbacks(config: RunConfig) -> list[object]:
    made, stopping = [maker(target)() for target in config.callbacks], config.early_stopping
    if stopping.patience is not None:
        made.insert(0, EarlyStopping(**stopping.model_dump()))
    return [*made, Probe(config.telemetry.probe)] if config.telemetry.probe else made


def make_plugin(config: RunConfig) -> Plugin:
    kind, options = plugin_of(config)
    return kind(**options)


def plugin_of(config: RunConfig) -> tuple[type[Plugin], dict[str, Any]]:
    name = config.plugin.name
    used = [key for key, (_, plugins) in sizes.uses().items() if name in plugins]
    return PLUGINS[name], {key: getattr(config.plugin, key) for key in used}


def steps_of(config: RunConfig, data: Data, data_size: int | None = None) -> int | None:
    samples, microbatch = length_of(data.train), config.data.batch_size
    microbatch *= data_size or data_parts(config)
    if config.data.drop_last and samples is not None:
        samples -= samples % microbatch
    epoch = None if samples is None else max(samples, 1)
    step = microbatch * config.accumulation.steps
    return total_steps(config.train.max_duration, epoch, step, data.tokens_per_sample)


def total_steps(duration: Duration, epoch: int | None, step: int, tokens: int | None) -> int | None:
    """Return the steps in ``duration``, given samples of an epoch and a step, tokens of a sample.

    The last step of an epoch may be short.
    """
    value, unit = duration.value, duration.unit
    if unit == "ba":
        return value
    if unit == "tok":
        if tokens is None:
            return None
        value = math.ceil(value / tokens)
    if epoch is None:
        return None if unit == "ep" else math.ceil(value / step)
    epochs, rest = (value, 0) if unit == "ep" else divmod(value, epoch)
    return epochs * math.ceil(epoch / step) + math.ceil(rest / step)


def samples_of(config: RunConfig) -> tuple[int | None, int]:
    """Return the samples of the training data, None of a stream, and those a step asks for."""
    asked = config.data.batch_size * config.accumulation.steps * data_parts(config)
    return length_of(make_data(config.data).train), asked


def data_parts(config: RunConfig) -> int:
    return sizes.data_parallel_size(config.plugin, ranks_of(config))


def ranks_of(config: RunConfig) -> int:
    return sizes.ranks_of(config.plugin, 0 if config.device == "cpu" else torch.cuda.device_count())
