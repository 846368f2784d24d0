"""Check a configuration with torch before its run creates anything.

A run starts only if the device supports the precision, the ranks fit on the machine, every
``_target_`` exists and takes its arguments, and the data exists and goes through the model. The
model is made on torch's meta device, where it takes no memory.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from runner.booster import SinglePlugin
from runner.booster.in_backward import why_not_in_parts
from runner.clip import Layout
from runner.clip import build as build_mode
from runner.clip.layout import OptionError
from runner.clip.second_moment import OptimizerMisfit
from runner.config.clip_section import Clip
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.schema import OWN_DATA, DataSection, LossSection, RunConfig
from runner.config.section import Target
from runner.config.sizes import SizeError, joined_ranks, sizes
from runner.data import Data
from runner.data.dataset import length_of
from runner.telemetry.sinks import tensorboard_sink
from runner.train import build, fit
from runner.train.callbacks import Callbacks
from runner.train.refused import first_line, refused, unknown, wrong_kinds

T = TypeVar("T")


def check(config: RunConfig, compared: bool = True, *, here: bool = True) -> None:
    """Check whether data, model and clipping mode can be made and fit; what is made is dropped."""
    problems = list(_machine(config)) if here else []
    of_parts = [*_of_parts(config.data)]
    problems += of_parts
    data = None if of_parts else _made("data", config.data, _make_data, problems)
    model = _made("model", config.model, _make_model, problems)
    known_loss = config.loss.target is None or (
        _made("loss", config.loss, _make_criterion, problems) is not None
    )
    if data is not None:
        problems += _durations(config, data)
    if model is not None:
        kind, options = build.plugin_of(config)
        layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
        if config.plugin.sync_batchnorm and next(layers, None) is None:
            none = f"{type(model).__name__} has no batch norm layer to synchronise; use false"
            problems.append(Problem("plugin.sync_batchnorm", True, none))
        if data is not None:
            problems += _sequence(config, data)
        if _misfit(config) is None:
            for key, value, message in kind.problems(model, build.ranks_of(config), options):
                problems.append(Problem(f"plugin.{key}", value, message))
        if data is not None and known_loss:
            problems += fit.check(config, model, data, compared)
        problems += _mode(config.clip, model)
    _optimizer_and_scheduler(config, data, model, problems)
    for target in config.callbacks:
        _made("callbacks", target, _make_callback, problems)
    if problems:
        raise RequestError(problems)


def _mode(clip: Clip, model: nn.Module) -> Iterator[Problem]:
    """Check that the options of the clipping mode fit the model."""
    try:
        build_mode(clip.kind, **clip.options).bind(Layout.of_model(model))
    except OptionError as error:
        value = getattr(clip, error.option) if error.value is NOTHING else error.value
        yield Problem(f"clip.{error.option}", value, str(error))
    except Exception as error:
        if clip.own_target is None:
            raise
        yield Problem("clip._target_", clip.own_target, f"cannot be used: {first_line(error)}")


def _machine(config: RunConfig) -> Iterator[Problem]:
    """Check what depends on this machine: devices, precision, number of ranks."""
    joined = joined_ranks()
    if joined and joined > 1 and config.plugin.name == "single":
        several = f"is one process, but {joined} ranks were started; plugin=ddp spreads over them"
        yield Problem("plugin", "single", several)
    gpu = torch.cuda.is_available() and config.device != "cpu"
    if config.device == "cuda" and not gpu:
        yield Problem("device", "cuda", "torch sees no GPU here; device=cpu or auto")
    if config.precision.name == "fp16" and not gpu:
        yield Problem("precision", "fp16", "this run is on a CPU: fp16 needs a GPU; bf16 or fp32")
    if config.precision.name == "bf16" and gpu and not torch.cuda.is_bf16_supported():
        yield Problem("precision", "bf16", "this GPU cannot compute in bf16; fp16 or fp32")
    if config.plugin.sync_batchnorm and not gpu:
        cannot = "this run is on a CPU: torch.nn.SyncBatchNorm computes on GPUs; use false"
        yield Problem("plugin.sync_batchnorm", True, cannot)
    if config.tracker.uses("tensorboard") and not tensorboard_sink.is_installed():
        key = "tracker" if config.tracker.name == "tensorboard" else "tracker.also"
        yield Problem(key, "tensorboard", f"is not installed: {tensorboard_sink.INSTALL}")
    ranks = build.ranks_of(config)
    if (error := _misfit(config)) is not None:
        value = joined if error.key == "nproc" else getattr(config.plugin, error.key)
        yield Problem(f"plugin.{error.key}", value, str(error))
    limit = torch.cuda.device_count() if gpu else max(8, 4 * (os.cpu_count() or 1))
    if ranks > limit and joined is None and config.plugin.nnodes in (None, 1):
        per = "one rank a GPU" if gpu else "four ranks a core"
        yield Problem("plugin.nproc", ranks, f"at most {limit} on this machine ({per})")


def _misfit(config: RunConfig) -> SizeError | None:
    """Return why the ranks that were started do not fit the sizes; None if they fit."""
    joined = joined_ranks()
    if joined is None or config.plugin.name == "single":
        return None
    try:
        sizes(config.plugin, joined, started=True)
    except SizeError as error:
        return error
    return None


def _of_parts(data: DataSection) -> Iterator[Problem]:
    """Check that ``data.train`` and ``data.eval`` name classes that take their arguments."""
    if data.target == OWN_DATA and "train" not in data.parts:
        needed = "must be the full name of a class or function that makes the data set"
        yield Problem("data.train._target_", None, f"{needed}, such as mine.Points")
    for name, part in data.parts.items():
        try:
            build.maker(part)
        except build.TargetError as error:
            yield Problem(f"data.{name}._target_", part.target, str(error))
        else:
            yield from unknown(f"data.{name}", part) + wrong_kinds(f"data.{name}", part)


def _made(
    section: str, target: Target, make: Callable[[Target], T], problems: list[Problem]
) -> T | None:
    """Return ``make(target)``; None if that fails, with its reasons added to ``problems``."""
    try:
        if wrong := unknown(section, target) + wrong_kinds(section, target):
            problems += wrong
            return None
        return make(target)
    except Exception as error:
        problems.append(refused(section, target, error))
        return None


def _make_criterion(target: Target) -> Any:
    assert isinstance(target, LossSection)
    return build.make_criterion(target)


def _make_data(target: Target) -> Data:
    assert isinstance(target, DataSection)
    data = build.make_data(target)
    for part in ("train", "test"):
        dataset = getattr(data, part)
        if isinstance(dataset, IterableDataset) or (part == "test" and dataset is None):
            continue
        if not hasattr(dataset, "__len__"):
            needed = f"its {part} data has no length, and is no IterableDataset"
            raise build.TargetError(f"{target.target}: {needed}")
    return data


def _make_callback(target: Target) -> None:
    try:
        Callbacks([build.maker(target)()], SinglePlugin())
    except TypeError as error:
        if "is no callback" not in str(error):
            raise
        raise build.TargetError(str(error)) from error


def _make_model(target: Target) -> nn.Module | None:
    """Make a model on the meta device; None if that device does not support it."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself shows them
            model = build.maker(target)()
    except Exception as error:
        if fit.about_meta(error):
            return None
        raise
    if model is None or isinstance(model, nn.Module):
        return model
    raise build.TargetError(f"makes a {type(model).__name__}, not a torch.nn.Module")


def _durations(config: RunConfig, data: Data) -> Iterator[Problem]:
    """Check that the data has what durations count, and one whole microbatch."""
    if data.tokens_per_sample is None:
        asked = {
            "train.max_duration": config.train.max_duration,
            "eval.interval": config.eval.interval,
        }
        for key, duration in asked.items():
            if duration.unit == "tok":
                message = f"{config.data.target} has no tokens; give it in ep, ba or sp"
                yield Problem(key, str(duration), message)
    samples = length_of(data.train)
    if samples is None:
        return
    needed = config.data.batch_size * build.data_parts(config)
    if samples == 0 or (config.data.drop_last and samples < needed):
        message = f"with drop_last a microbatch of all ranks is {needed} of only {samples} samples"
        yield Problem("data.batch_size", config.data.batch_size, message)


def _sequence(config: RunConfig, data: Data) -> Iterator[Problem]:
    """Check that sequences can be split evenly over tensor-parallel ranks, if they are split."""
    length, ranks = data.tokens_per_sample, build.ranks_of(config)
    try:
        parts = sizes(config.plugin, ranks).tp if config.plugin.sequence_parallel else 1
    except SizeError:
        return  # _misfit or the plugin reports it
    if length is not None and length % parts:
        message = f"cannot split sequences of {length} evenly over {parts} ranks (plugin.tp_size)"
        yield Problem("plugin.sequence_parallel", True, message)


def _optimizer_and_scheduler(
    config: RunConfig, data: Data | None, model: nn.Module | None, problems: list[Problem]
) -> None:
    """Check that both can be made, over a parameter of one element."""
    parameter = nn.Parameter(torch.zeros(1))
    steps = 1 if data is None else build.steps_of(config, data)

    def make_optimizer(target: Target) -> Optimizer:
        whole = build.takes_model(build.maker(target))
        stand_in = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
        over = (model or stand_in) if whole else nn.ParameterList([parameter])
        made = build.make_optimizers(target, over)
        for each in made:
            _require_plain_step(target, each)
            if config.clip.step_in_backward and (why := why_not_in_parts(each)):
                raise build.TargetError(why)
        return made[0]

    def make_scheduler(target: Target) -> None:
        _require_plain_step(target, build.make_scheduler(target, optimizer, steps))

    made = _made("optimizer", config.optimizer, make_optimizer, problems)
    if made is not None:
        problems += _optimizer_of_mode(config, made)
    optimizer = made or torch.optim.SGD([parameter], lr=0.1)
    _made("scheduler", config.scheduler, make_scheduler, problems)


def _optimizer_of_mode(config: RunConfig, optimizer: Optimizer) -> Iterator[Problem]:
    """Check that the clipping mode is defined on the optimizer."""
    if not config.clip.described.info.needs_optimizer:
        return
    try:
        build_mode(config.clip.kind, **config.clip.options).require_optimizers([optimizer])
    except OptimizerMisfit as error:
        yield Problem("optimizer._target_", config.optimizer.target, str(error))
    except Exception:
        if config.clip.own_target is None:  # that of a user is reported by _mode
            raise


def _require_plain_step(target: Target, made: Any) -> None:
    """Raise a TargetError if ``step`` needs an argument, which the training loop does not have."""
    for name, parameter in inspect.signature(made.step).parameters.items():
        if (
            parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ):
            raise build.TargetError(f"{target.target} cannot be used: its step asks for {name}")
