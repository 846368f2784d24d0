"""Check a configuration with torch before its run creates anything.

Every ``_target_`` is made, the model on torch's meta device, where it takes no memory; two samples
of the data go through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from runner.booster import SinglePlugin
from runner.booster.criterion import Criterion
from runner.booster.in_backward import refused_in_backward, why_not_in_parts
from runner.clip import build as build_mode
from runner.clip.second_moment import OptimizerMisfit
from runner.clip.update_norm import require_known
from runner.config.accumulation import AUTO
from runner.config.environment import started_rank
from runner.config.identity import NO_PATH, digest
from runner.config.notation import first_line, message_of, plural
from runner.config.problem import NOTHING, ArgumentError, Problem, RequestError, Suggesting
from runner.config.schema import ModelSection, OptimizerSection, RunConfig, SchedulerSection
from runner.config.section import Target
from runner.data import Data, DataUnavailable
from runner.data.dataset import length_of
from runner.gradients import Layout, OptionError
from runner.models.weights import WeightsError, load_weights
from runner.optim.groups import GroupError
from runner.parallel.compiling import wrong_option
from runner.parallel.recompute import blocks_of
from runner.train import build
from runner.train.callbacks import Callbacks
from runner.train.left_out import IN_TOKENS, NO_INDICES, positions_of
from runner.train.logged import evaluated, unlogged_keys
from runner.train.maker import TargetError, maker, misfits, require_plain_step
from runner.train.model import make_on_meta
from runner.train.options import NO_UPDATE_RATIO
from runner.train.progress import Length
from runner.train.ranks import too_many, unfit_model, unfit_size
from runner.train.recording import NO_NOISE_SCALE
from runner.train.state import followed_metric
from runner.train.trial import misfits_of_samples

T = TypeVar("T")
INSTALL = 'is not installed: pip install "clip-runner[tensorboard]"'
EXPLAINS = (TargetError, DataUnavailable, OptimizerMisfit)
"""Exceptions whose message stands alone."""


class ComparedWeights:
    """Weights to start from, compared with the models of several jobs: each pair is read once."""

    def __init__(self) -> None:
        self._refusals: dict[str, str] = {}  # by section ``model``; empty: they fit

    def problems(self, section: ModelSection, model: nn.Module) -> Iterator[Problem]:
        """Yield why the weights cannot be loaded into the model, by their names and shapes."""
        assert section.file is not None
        setting = digest(section.model_dump(mode="json"))
        if setting not in self._refusals:
            self._refusals[setting] = ""
            try:
                load_weights(model, section.file, section.strict, section.leave_out)
            except WeightsError as error:
                self._refusals[setting] = str(error)
        if self._refusals[setting]:
            yield Problem("model.weights", section.weights, self._refusals[setting])


def check(
    config: RunConfig,
    compared: bool = True,
    *,
    here: bool = True,
    weights: ComparedWeights | None = None,
) -> set[str]:
    """Raise a RequestError of all that is wrong with a run; return notes on what is right.

    Args:
        config: the checked configuration.
        compared: whether the run is one of a sweep, whose runs are compared by a metric.
        here: whether it runs on this machine.
        weights: what was read for earlier jobs of the same request.
    """
    checks = _Checks()
    ranks = build.ranks_of(config)
    data_parts = build.data_parallel_size(config.plugin, ranks)
    unfit = unfit_size(config.plugin, ranks)
    if unfit is not None:
        checks.problems.append(unfit)
    if here:
        checks.problems += _machine(config, ranks)
        checks.problems += _accumulation(config)
    checks.problems += _noise_scale(config)
    data = checks.make("data", config.data, build.make_data)
    model = checks.make("model", config.model, make_on_meta)
    criterion = checks.make("loss", config.loss, build.make_criterion)
    if data is not None:
        checks.problems += _durations(config, data, data_parts)
        checks.problems += unlogged_keys(config, data, compared)
        checks.problems += _left_out(config, data, data_parts)
    if model is not None:
        checks.problems += _blocks(config, model)
        checks.problems += _weights(config, model, weights or ComparedWeights())
    if model is not None and unfit is None:
        tokens = None if data is None else data.tokens_per_sample
        batch = config.data.batch_size
        checks.problems += unfit_model(config.plugin, ranks, model, batch, tokens)
        checks.problems += _compile(config, ranks)
    if model is not None and data is not None:
        checks.problems += _samples(config, model, data, criterion)
    checks.problems += _mode(config, model)
    checks.optimizer_and_scheduler(config, data, model, data_parts)
    for target in config.callbacks:
        checks.make("callbacks", target, _make_callback)
    if config.tracker.own is not None:
        checks.make("tracker", config.tracker.own, _require_sink)
    if checks.problems:
        raise RequestError(checks.problems)
    samples = None if data is None else length_of(data.train)
    return {*_notes(config, ranks, data_parts, samples, here)}


def _notes(
    config: RunConfig, ranks: int, data_parts: int, samples: int | None, here: bool
) -> Iterator[str]:
    """Yield what a user may not expect of a run that can be trained."""
    samples_of_step = config.data.batch_size * config.accumulation.phases.most * data_parts
    if samples is not None and samples_of_step > samples:
        yield (
            f"a step has all {plural(samples, 'sample', ',')} of the data, not "
            f"{samples_of_step:,}: lower data.batch_size"
        )
    end = config.train.max_duration
    for start in config.accumulation.phases.starts:
        if start.unit == end.unit and start.value >= end.value:
            yield f"the run ends at {end}, before the phase of accumulation.steps from {start}"
    if here and started_rank() is None and config.plugin.may_grow and ranks == 1:
        yield (
            f"plugin={config.plugin.name} runs on one rank: plugin.nproc is not given, and "
            "this run uses at most one GPU. plugin.nproc=2 starts two ranks."
        )


def _blocks(config: RunConfig, model: nn.Module) -> Iterator[Problem]:
    """Yield what needs blocks, where the model has none."""
    by_blocks: dict[str, Any] = {}
    if config.checkpointed_blocks:
        by_blocks["activation_checkpointing"] = config.activation_checkpointing
    if config.compile.name == "blocks":
        by_blocks["compile"] = "blocks"
    for key, value in by_blocks.items():
        try:
            blocks_of(model)
        except ValueError as error:
            yield Problem(key, value, str(error))


def _compile(config: RunConfig, ranks: int) -> Iterator[Problem]:
    """Yield why the model cannot be compiled as asked."""
    if config.compile.name == "none":
        return
    options = config.compile.options
    wrong = wrong_option(options, on_cpu=build.device_of(config.device).type == "cpu")
    if wrong is not None:
        name, reason = wrong
        yield Problem(f"compile.{name}", options[name], reason)
    if config.compile.name == "model" and build.mesh_of(config.plugin, ranks).pp > 1:
        reason = "stages of a pipeline call parts of the model, never the whole: use compile=blocks"
        yield Problem("compile", "model", reason)


def _weights(config: RunConfig, model: nn.Module, weights: ComparedWeights) -> Iterator[Problem]:
    """Yield why the weights that a run starts from do not fit the model."""
    if config.model.file is None or config.resume.source not in NO_PATH:
        return  # a checkpoint has all weights
    yield from weights.problems(config.model, model)


def _samples(
    config: RunConfig, model: nn.Module, data: Data, criterion: Criterion | None
) -> Iterator[Problem]:
    """Yield why two samples do not go through the model and the criterion, if this was made."""
    if criterion is not None or config.loss.target is None:
        yield from misfits_of_samples(config, model, data, criterion)


def _machine(config: RunConfig, ranks: int) -> Iterator[Problem]:
    """Yield what this machine lacks for the run."""
    gpu = torch.cuda.is_available() and config.device != "cpu"
    if config.device == "cuda" and not gpu:
        yield Problem("device", "cuda", "torch sees no GPU here; device=cpu or auto")
    if config.precision.name == "fp16" and not gpu:
        yield Problem("precision", "fp16", "this run is on a CPU: fp16 needs a GPU; bf16 or fp32")
    if config.tracker.uses("tensorboard") and find_spec("tensorboard") is None:
        key = "tracker" if config.tracker.name == "tensorboard" else "tracker.also"
        yield Problem(key, "tensorboard", INSTALL)
    problem = too_many(config.plugin, ranks, uses_gpus=gpu)
    if problem is not None:
        yield problem


def _accumulation(config: RunConfig) -> Iterator[Problem]:
    """Yield why a run here cannot find by itself how many microbatches a step needs."""
    if not config.accumulation.finds:
        return
    started = started_rank()
    reason = ""
    if build.device_of(config.device).type == "cpu":
        reason = "nothing tells on a CPU that memory is short"
    elif (config.plugin.nnodes or 1) > 1 or (started is not None and started.world_size > 1):
        reason = "only ranks that this command starts can be tried"
    if reason:
        text = f"{reason}: give accumulation.steps=N, and data.batch_size of one microbatch"
        yield Problem("accumulation.steps", AUTO, text)


def _noise_scale(config: RunConfig) -> Iterator[Problem]:
    """Yield ``telemetry.noise_scale`` where a step has no two gradients to compare."""
    splits_model = config.plugin.name not in ("single", "ddp")
    lacks = splits_model or config.accumulation.phases.most < 2 or config.clip.norm_type != 2.0
    if config.telemetry.noise_scale and lacks:
        yield Problem("telemetry.noise_scale", True, NO_NOISE_SCALE)


def _durations(config: RunConfig, data: Data, data_parts: int) -> Iterator[Problem]:
    """Yield durations that the data cannot measure, and a microbatch that is larger than it."""
    if data.tokens_per_sample is None:
        ends = {
            "train.max_duration": config.train.max_duration,
            "eval.interval": config.eval.interval,
        }
        for start in config.accumulation.phases.starts[:1]:
            ends["accumulation.steps"] = start
        for key, duration in ends.items():
            if duration.unit == "tok":
                message = f"{config.data.target} has no tokens; give it in ep, ba or sp"
                yield Problem(key, str(duration), message)
    samples = length_of(data.train)
    needed = config.data.batch_size * data_parts
    if samples == 0 or (samples is not None and config.data.drop_last and samples < needed):
        whole = plural(samples, "sample")
        message = f"with drop_last a microbatch of all ranks is {needed} of only {whole}"
        yield Problem("data.batch_size", config.data.batch_size, message)


def _left_out(config: RunConfig, data: Data, data_parts: int) -> Iterator[Problem]:
    """Yield steps and samples to leave out that the data does not have."""
    asked = config.data.leave_out
    if not asked.names_any:
        return
    if length_of(data.train) is None:
        yield Problem("data.leave_out", asked.steps or asked.samples, NO_INDICES)
        return
    try:
        list(positions_of(asked.samples_left_out, data.train))
    except ValueError as error:
        yield Problem("data.leave_out.samples", asked.samples, str(error))
    if asked.steps and any(start.unit == "tok" for start in config.accumulation.phases.starts):
        yield Problem("data.leave_out.steps", asked.steps, IN_TOKENS)
        return
    steps = build.steps_of(config, data, data_parts)
    if asked.steps and steps is not None and max(asked.steps_left_out) > steps:
        message = f"the run has {plural(steps, 'step', ',')} alone"
        yield Problem("data.leave_out.steps", asked.steps, message)


def _mode(config: RunConfig, model: nn.Module | None) -> Iterator[Problem]:
    """Yield options of the clipping mode that do not fit the model or the rest of the run."""
    clip = config.clip
    try:
        mode = build_mode(clip.options)
        if model is not None:
            mode.bind(Layout.of_model(model))
        if clip.when == "backward":
            if config.plugin.name != "single":
                why = f"plugin={config.plugin.name} makes gradients final after that pass: use step"
                yield Problem("clip.when", clip.when, why)
            if clip.step_in_backward and config.telemetry.update_ratio:
                yield Problem("telemetry.update_ratio", True, NO_UPDATE_RATIO)
            for key, why in refused_in_backward(
                mode,
                step=clip.step_in_backward,
                nonfinite=clip.nonfinite,
                fp16=config.precision.name == "fp16",
                skip=clip.skip.rule is not None,
            ):
                yield Problem(key, _value_of(config, key), why)
    except OptionError as error:
        value = error.value
        if value is NOTHING:
            value = getattr(clip.options, error.option)
        yield Problem(f"clip.{error.option}", value, str(error))
    except Exception as error:
        if clip.target is None:
            raise
        yield Problem("clip._target_", clip.target, f"cannot be used: {first_line(error)}")


def _value_of(section: Any, key: str) -> Any:
    """Return the value of a dotted key of a section."""
    for name in key.split("."):
        section = getattr(section, name)
    return section


def _make_callback(target: Target) -> Callbacks:
    return Callbacks([maker(target)()], SinglePlugin())


def _require_sink(target: Target) -> None:
    """Import a tracker of the user's own, which is made when the run begins."""
    made = maker(target).func
    if not (callable(getattr(made, "write", None)) and callable(getattr(made, "close", None))):
        raise TargetError(f"{target.target} is no sink: it has no write and close")


class _Checks:
    """Makes the objects of a run, and collects what is wrong with them in ``problems``."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def make(self, section: str, target: Any, make: Callable[[Any], T]) -> T | None:
        """Return what ``make`` makes of a target; None if it cannot."""
        try:
            return make(target)
        except Exception as error:
            wrong_arguments = []
            if isinstance(error, TypeError):
                wrong_arguments = list(misfits(section, target))
            self.problems += wrong_arguments or [_refused(section, target, error)]
            return None

    def optimizer_and_scheduler(
        self, config: RunConfig, data: Data | None, model: nn.Module | None, data_parts: int
    ) -> None:
        """Make them over the model; over another one if it cannot be made."""
        run = Length(1, 1) if data is None else build.run_length(config, data, data_parts)
        over = model
        if over is None:
            over = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))

        def make_optimizer(target: OptimizerSection) -> torch.optim.Optimizer:
            optimizers = self._optimizers(target, over, is_own_model=model is not None)
            _require_fit(config, target, optimizers)
            return optimizers[0]

        def make_scheduler(target: SchedulerSection) -> None:
            scheduler = build.make_scheduler(target, first_optimizer, run)
            if not isinstance(scheduler, ReduceLROnPlateau):
                require_plain_step(target, scheduler)
            elif data is not None:
                _require_metric(config, data, scheduler)

        optimizer = self.make("optimizer", config.optimizer, make_optimizer)
        first_optimizer = optimizer or torch.optim.SGD(over.parameters(), lr=0.1)
        self.make("scheduler", config.scheduler, make_scheduler)

    def _optimizers(
        self, target: OptimizerSection, model: nn.Module, is_own_model: bool
    ) -> list[torch.optim.Optimizer]:
        """Make the optimizers; without groups of parameters if these do not fit the model."""
        try:
            return build.make_optimizers(target, model)
        except GroupError as error:
            if is_own_model:
                key = "no_decay" if target.groups is None else "groups"
                value = getattr(target, key)
                self.problems.append(
                    Problem(f"optimizer.{key}", value, str(error), error.suggestion)
                )
            without_groups = target.model_copy(update={"groups": None, "no_decay": None})
            return build.make_optimizers(without_groups, model)


def _refused(section: str, target: Any, error: Exception) -> Problem:
    """Return the problem of a target that cannot be made, or of its argument that is wrong."""
    suggestion = error.suggestion if isinstance(error, Suggesting) else ""
    message = message_of(error)
    if isinstance(error, ArgumentError | DataUnavailable) and error.argument in target.arguments:
        reason = error.reason if isinstance(error, DataUnavailable) else message
        value = target.arguments[error.argument]
        return Problem(f"{section}.{error.argument}", value, reason, suggestion)
    invalid = _invalid_argument(message, target.arguments)
    if invalid is not None:
        return Problem(f"{section}.{invalid}", target.arguments[invalid], message)
    if not isinstance(error, EXPLAINS):
        message = f"refused its arguments: {first_line(error)}"
    return Problem(f"{section}._target_", target.target, message, suggestion)


def _invalid_argument(message: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the argument whose value an error of torch ends with: ``Invalid momentum value: -1``.

    Of several arguments with this value, it is the one whose name begins like a word of the error.
    """
    if not message.startswith("Invalid "):
        return None
    value = message.rpartition(" ")[2]
    names = []
    for name, argument in arguments.items():
        values = argument if isinstance(argument, list | tuple) else [argument]
        if value in map(str, values):
            names.append(name)
    if len(names) > 1:
        names = [name for name in names if name[:3] in message]
    return names[0] if len(names) == 1 else None


def _require_fit(
    config: RunConfig, target: Target, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Refuse optimizers that cannot step as the plugin or the clipping mode asks them to."""
    clip = config.clip
    plugin = config.plugin
    shards = plugin.name == "fsdp" or plugin.zero_stage > 1 or plugin.tp_size != 1
    for optimizer in optimizers:
        require_plain_step(target, optimizer)
        if isinstance(optimizer, torch.optim.Adafactor) and shards:
            raise TargetError("steps whole parameters: use plugin=ddp, which shards none")
        if clip.step_in_backward:
            reason = why_not_in_parts(optimizer)
            if reason:
                raise TargetError(reason)
    if clip.info.needs_optimizer and clip.target is None:
        build_mode(clip.options).require_optimizers(optimizers[:1])
    if clip.skip.of == "update":
        require_known(optimizers)


def _require_metric(config: RunConfig, data: Data, scheduler: ReduceLROnPlateau) -> None:
    """Refuse a schedule that follows a metric which no evaluation of the run has."""
    if data.test is None:
        raise TargetError("follows evaluations, and this run has no held-out data")
    try:
        followed_metric(scheduler, evaluated(config, data))
    except ValueError as error:
        raise TargetError(str(error)) from None
