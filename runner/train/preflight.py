"""Check a configuration with torch before its run creates anything.

Every ``_target_`` is made, the model on torch's meta device, where it takes no memory; two samples
of the data go through it.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.booster import SinglePlugin
from runner.booster.batch import BatchError, mapped, targets_of
from runner.booster.criterion import is_of_torch
from runner.booster.in_backward import why_not_in_parts
from runner.booster.loss import Loss, WindowLoss
from runner.booster.outputs import logits_of, returned_loss
from runner.booster.plugin import SCHEDULES, SizeError
from runner.clip import ClipMode, Decision
from runner.clip import build as build_mode
from runner.clip.second_moment import OptimizerMisfit
from runner.config.environment import (
    StartedRank,
    in_slurm_step,
    most_ranks_on_cpus,
    started_nodes,
    started_rank,
    variable,
)
from runner.config.identity import NO_PATH
from runner.config.notation import in_one_line, message_of, plural
from runner.config.problem import (
    MISSING,
    NOTHING,
    Problem,
    RequestError,
    did_you_mean,
    or_list,
    unknown_key,
)
from runner.config.schema import OptimizerSection, RunConfig
from runner.config.section import Target
from runner.data import Data, DataUnavailable
from runner.data.dataset import UnequalSamples, first_samples, length_of, targets_in_memory
from runner.gradients import Layout, OptionError
from runner.models.weights import WeightsError, load_weights
from runner.optim.groups import GroupError
from runner.run_folder import keys
from runner.telemetry.meter import Meter
from runner.telemetry.step import StepMetrics
from runner.train import build
from runner.train.build import TargetError
from runner.train.callbacks import Callbacks
from runner.train.metrics import EvalMetrics, MetricError, name_of
from runner.train.passes import NO_NOISE_SCALE, NO_UPDATE_RATIO

T = TypeVar("T")
INSTALL = 'is not installed: pip install "clip-runner[tensorboard]"'
EXPLAINS = (TargetError, DataUnavailable, OptimizerMisfit)
"""Exceptions whose message stands alone."""


def check(config: RunConfig, compared: bool = True, *, here: bool = True) -> None:
    """Raise a RequestError of all that is wrong with a run, one of a sweep if it is compared."""
    unfit = _unfit_size(config)
    problems = [*([unfit] if unfit else []), *(_machine(config) if here else [])]
    spread = config.plugin.name not in ("single", "ddp") or config.accumulation.steps < 2
    if config.telemetry.noise_scale and (spread or config.clip.norm_type != 2.0):
        problems.append(Problem("telemetry.noise_scale", True, NO_NOISE_SCALE))
    data = _made("data", config.data, build.make_data, problems)
    model = _made("model", config.model, make_on_meta, problems)
    if model is not None:
        problems += _weights(config, model)
    criterion = _made("loss", config.loss, build.make_criterion, problems)
    if data is not None:
        problems += [*_durations(config, data), *_logged_keys(config, data, compared)]
    if model is not None:
        if unfit is None:
            problems += _plugin(config, model, None if data is None else data.tokens_per_sample)
        if data is not None and (criterion is not None or config.loss.target is None):
            problems += _fit(config, model, data, criterion)
    problems += _mode(config, model)
    _optimizer_and_scheduler(config, data, model, problems)
    for target in config.callbacks:
        _made("callbacks", target, _make_callback, problems)
    if problems:
        raise RequestError(problems)


def _made(section: str, target: Any, make: Callable[[Any], T], problems: list[Problem]) -> T | None:
    try:
        return make(target)
    except Exception as error:
        if isinstance(error, TypeError) and (found := [*_misfits(section, target)]):
            problems += found
            return None
        explains = isinstance(error, EXPLAINS)
        message = str(error) if explains else f"refused its arguments: {_first_line(error)}"
        problems.append(Problem(f"{section}._target_", target.target, message))
        return None


def _misfits(section: str, target: Target) -> Iterator[Problem]:
    """Yield the arguments that a target does not have, and of model and data those it needs."""
    try:
        taken = inspect.signature(build.maker(target).func).parameters
    except (TypeError, ValueError):  # a compiled function may have none
        return
    if all(one.kind is not one.VAR_KEYWORD for one in taken.values()):
        known = [f"{section}.{name}" for name in taken]
        for name in target.arguments.keys() - taken.keys():
            yield unknown_key(f"{section}.{name}", known, target.arguments[name])
    for name, one in taken.items() if section in ("model", "data") else ():
        named = one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if named and one.default is one.empty and name not in target.arguments:
            yield Problem(f"{section}.{name}", MISSING, f"no value given: {target.target} needs it")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {message_of(error).strip().partition(chr(10))[0]}"


def _unfit_size(config: RunConfig) -> Problem | None:
    """Return what is wrong with the sizes of the plugin for the ranks of this run."""
    plugin, ranks, started = config.plugin, build.ranks_of(config), started_rank()
    nodes, local = plugin.nnodes or 1, ranks // (plugin.nnodes or 1)
    if started is not None:
        nodes, local = started_nodes() or nodes, started.local_world_size
        if problem := _unfit_for_started(config, started):
            return problem
    try:
        parts = build.mesh_of(plugin, ranks).tp
    except SizeError as error:
        key = error.key
        if key == "nproc" and started is not None:
            sizes = ("tp_size", "pp_size", "dp_size")
            typed = [name for name in sizes if (getattr(plugin, name) or 1) > 1]
            if not typed:
                return Problem("plugin", plugin.name, str(error))
            key = typed[0]
        elif key == "nproc" and plugin.nproc is None and nodes > 1:
            key = "nnodes"
        return Problem(f"plugin.{key}", getattr(plugin, key) or ranks, str(error))
    if plugin.nnodes not in (None, nodes):
        text = f"{plural(nodes, 'machine')} started ranks: leave it out"
        return Problem("plugin.nnodes", plugin.nnodes, text)
    if nodes > 1 and local % parts:
        text = f"{parts} do not divide the {local} ranks of a machine (plugin.nnodes={nodes})"
        return Problem("plugin.tp_size", plugin.tp_size, text)
    return None


def _unfit_for_started(config: RunConfig, started: StartedRank) -> Problem | None:
    """Return why a run cannot use the ranks that torchrun or srun started."""
    ranks, nproc = started.world_size, config.plugin.nproc
    starter = "srun" if in_slurm_step() else "torchrun"
    if config.plugin.name == "single" and ranks > 1:
        text = f"trains on one rank, and {starter} started {ranks}: plugin=ddp trains on all"
        if starter == "srun":
            text += "; separate runs: srun env -u SLURM_PROCID python -m runner"
        return Problem("plugin", "single", text)
    local = variable("LOCAL_WORLD_SIZE")
    if nproc is None or nproc == local or (local is None and ranks % nproc == 0):
        return None
    count = plural(ranks, "rank") if local is None else f"{plural(local, 'rank')} on each machine"
    return Problem("plugin.nproc", nproc, f"{starter} started {count}: leave it out")


def _machine(config: RunConfig) -> Iterator[Problem]:
    gpu = torch.cuda.is_available() and config.device != "cpu"
    if config.device == "cuda" and not gpu:
        yield Problem("device", "cuda", "torch sees no GPU here; device=cpu or auto")
    if config.precision.name == "fp16" and not gpu:
        yield Problem("precision", "fp16", "this run is on a CPU: fp16 needs a GPU; bf16 or fp32")
    if config.tracker.uses("tensorboard") and find_spec("tensorboard") is None:
        key = "tracker" if config.tracker.name == "tensorboard" else "tracker.also"
        yield Problem(key, "tensorboard", INSTALL)
    ranks = build.ranks_of(config)
    limit = torch.cuda.device_count() if gpu else most_ranks_on_cpus()
    if ranks > limit and started_rank() is None and config.plugin.nnodes in (None, 1):
        per = "one rank a GPU" if gpu else "four ranks a core"
        yield Problem("plugin.nproc", ranks, f"at most {limit} on this machine ({per})")


def _weights(config: RunConfig, model: nn.Module) -> Iterator[Problem]:
    """Compare the names and shapes of the weights to start from with those of the model."""
    section = config.model
    if section.file is None or config.resume.source not in NO_PATH:
        return  # a checkpoint has all weights
    try:
        load_weights(model, section.file, section.strict, section.leave_out)
    except WeightsError as error:
        yield Problem("model.weights", section.weights, str(error))


def _make_callback(target: Target) -> Callbacks:
    return Callbacks([build.maker(target)()], SinglePlugin())


def make_on_meta(target: Target) -> nn.Module | None:
    """Make a model without values; None if it needs them while it is made."""
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            model = build.maker(target)()
    except Exception as error:
        if _about_meta(error):
            return None
        raise
    if not isinstance(model, nn.Module):
        raise TargetError(f"makes a {type(model).__name__}, not a torch.nn.Module")
    return model


def _about_meta(error: Exception) -> bool:
    # item() raises a RuntimeError, numpy() a TypeError.
    return isinstance(error, NotImplementedError) or bool(re.search(r"\bmeta\b", str(error), re.I))


def _durations(config: RunConfig, data: Data) -> Iterator[Problem]:
    ends = {"train.max_duration": config.train.max_duration, "eval.interval": config.eval.interval}
    for key, duration in ends.items() if data.tokens_per_sample is None else ():
        if duration.unit == "tok":
            message = f"{config.data.target} has no tokens; give it in ep, ba or sp"
            yield Problem(key, str(duration), message)
    samples = length_of(data.train)
    needed = config.data.batch_size * build.data_parts(config)
    if samples == 0 or (samples is not None and config.data.drop_last and samples < needed):
        message = f"with drop_last a microbatch of all ranks is {needed} of only {samples} samples"
        yield Problem("data.batch_size", config.data.batch_size, message)


def _plugin(config: RunConfig, model: nn.Module, tokens: int | None) -> Iterator[Problem]:
    kind, options = build.plugin_of(config)
    for key, value, message in kind.problems(model, build.ranks_of(config), options):
        yield Problem(f"plugin.{key}", value, message)
    plugin, batch = config.plugin, config.data.batch_size
    sizes = build.mesh_of(plugin, build.ranks_of(config))
    if plugin.sequence_parallel and (sizes.tp == 1 or (tokens or 0) % sizes.tp):
        message = "splits over plugin.tp_size ranks, which must be 2 or more"
        if sizes.tp > 1:
            message = f"cannot split sequences of {tokens} evenly over {sizes.tp} ranks"
        yield Problem("plugin.sequence_parallel", True, message)
    stages = sizes.pp * SCHEDULES[plugin.schedule].stages_per_rank
    if sizes.pp > 1 and batch < (parts := plugin.num_microbatches or stages):
        yield Problem("data.batch_size", batch, f"must be {parts} or more: plugin.num_microbatches")


def _mode(config: RunConfig, model: nn.Module | None) -> Iterator[Problem]:
    clip = config.clip
    try:
        mode = build_mode(clip.options)
        if model is not None:
            mode.bind(Layout.of_model(model))
        if clip.when == "backward":
            for key, why in _refused_in_backward(config, mode):
                yield Problem(key, attrgetter(key)(config), why)
    except OptionError as error:
        value = error.value
        if value is NOTHING:
            value = getattr(clip.options, error.option)
        yield Problem(f"clip.{error.option}", value, str(error))
    except Exception as error:
        if clip.target is None:
            raise
        yield Problem("clip._target_", clip.target, f"cannot be used: {_first_line(error)}")


def _refused_in_backward(config: RunConfig, mode: ClipMode) -> Iterator[tuple[str, str]]:
    clip, plugin = config.clip, config.plugin.name
    if plugin != "single":
        yield "clip.when", f"plugin={plugin} makes gradients final after that pass: use step"
    if clip.step_in_backward and config.telemetry.update_ratio:
        yield "telemetry.update_ratio", NO_UPDATE_RATIO
    yield from mode.refused_in_backward(
        step=clip.step_in_backward,
        nonfinite=clip.nonfinite,
        fp16=config.precision.name == "fp16",
        skip=clip.skip.rule is not None,
    )


def _optimizer_and_scheduler(
    config: RunConfig, data: Data | None, model: nn.Module | None, problems: list[Problem]
) -> None:
    over, clip = model or nn.Sequential(*(nn.Linear(1, 1) for _ in range(3))), config.clip
    steps = 1 if data is None else build.steps_of(config, data)
    plugin = config.plugin
    shards = plugin.name == "fsdp" or plugin.zero_stage > 1 or plugin.tp_size != 1

    def make_optimizer(target: OptimizerSection) -> torch.optim.Optimizer:
        made = _optimizers(target, over, problems if model is not None else [])
        for each in made:
            _require_plain_step(target, each)
            if isinstance(each, torch.optim.Adafactor) and shards:
                raise TargetError("steps whole parameters: use plugin=ddp, which shards none")
            if clip.step_in_backward and (why := why_not_in_parts(each)):
                raise TargetError(why)
        if clip.info.needs_optimizer and clip.target is None:
            build_mode(clip.options).require_optimizers(made[:1])
        return made[0]

    def make_scheduler(target: Target) -> None:
        scheduler = build.make_scheduler(target, optimizer, steps)
        if not isinstance(scheduler, ReduceLROnPlateau):
            _require_plain_step(target, scheduler)
        elif data is not None:
            _require_metric(config, data, getattr(scheduler, "metric", keys.EVAL_LOSS))

    made = _made("optimizer", config.optimizer, make_optimizer, problems)
    optimizer = made or torch.optim.SGD(over.parameters(), lr=0.1)
    _made("scheduler", config.scheduler, make_scheduler, problems)


def _require_metric(config: RunConfig, data: Data, metric: str) -> None:
    """Refuse a schedule that follows a metric which no evaluation has."""
    if data.test is None:
        raise TargetError("follows evaluations, and this run has no held-out data")
    names = [name for name in logged(config, data) if name.startswith(keys.EVAL)]
    if metric not in names:
        raise TargetError(f"follows {metric}, and evaluations have {or_list(names)}")


def _optimizers(
    target: OptimizerSection, model: nn.Module, problems: list[Problem]
) -> list[torch.optim.Optimizer]:
    """Make the optimizers; those of one group where the groups do not fit the model."""
    try:
        return build.make_optimizers(target, model)
    except GroupError as error:
        key = "no_decay" if target.groups is None else "groups"
        problems.append(Problem(f"optimizer.{key}", getattr(target, key), str(error)))
        without_groups = target.model_copy(update={"groups": None, "no_decay": None})
        return build.make_optimizers(without_groups, model)


def _require_plain_step(target: Target, made: Any) -> None:
    for name, one in inspect.signature(made.step).parameters.items():
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD:
            raise TargetError(f"{target.target} cannot be used: its step asks for {name}")


def _fit(config: RunConfig, model: nn.Module, data: Data, criterion: Any) -> Iterator[Problem]:
    """Check that two samples go through model and criterion, and that metrics take the outputs."""
    if length_of(data.train) == 0:
        return
    try:
        loss = WindowLoss(model, Loss(criterion, config.loss.items))
    except ValueError as error:  # its reduction
        if config.loss.items != "auto":
            yield Problem("loss.items", config.loss.items, str(error))
        else:
            yield Problem("loss._target_", config.loss.target, str(error))
        return
    trial = _Trial(config, model, loss)
    try:
        trial.run(data, criterion)
    except (BatchError, DataUnavailable) as error:
        yield Problem("data._target_", config.data.target, str(error))
    except MetricError as error:
        yield Problem("eval.metrics", error.metric, str(error))
    except TargetError as error:
        yield Problem(*trial.at_fault, str(error))
    except Exception as error:
        if not _about_meta(error):
            yield Problem(*trial.at_fault, trial.refusal(error))


class _Trial:
    """Two samples on torch's meta device, which takes no memory.

    Attributes:
        at_fault: key and value of the target that an exception comes from.
    """

    def __init__(self, config: RunConfig, model: nn.Module, loss: WindowLoss) -> None:
        self._config = config
        self._model = model
        self._loss = loss
        self._samples: Any = None
        self.at_fault: tuple[str, str | None] = ("model._target_", config.model.target)

    def run(self, data: Data, criterion: Any) -> None:
        """Run model, criterion and metrics on the first two samples."""
        loss = self._loss
        self._samples = self._read(data)
        loss.items(self._samples)
        batch = mapped(self._samples, lambda t: t.to("meta"))
        if isinstance(criterion, nn.Module):
            criterion.to("meta")
        with torch.device("meta"), torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outputs = loss.forward(self._model, batch)
            if not loss.takes_batch and returned_loss(outputs) is None:
                self.at_fault = ("loss._target_", self._config.loss.target)
                if criterion is None and _are_numbers(targets_of(self._samples)):
                    raise TargetError(
                        "must name a criterion, such as torch.nn.MSELoss: the targets are numbers, "
                        "not classes"
                    )
            total = loss.sum(outputs, batch, items=1)
        self._require_classes(data, outputs)
        self._require_loss(total, outputs, caught)
        if self._config.eval.metrics:
            EvalMetrics(self._config.eval.metrics, loss).try_on(logits_of(outputs), self._samples)

    def _require_classes(self, data: Data, outputs: Any) -> None:
        """Refuse targets that are no classes of the outputs, of all samples that are in memory."""
        classes = self._loss.classes(outputs, self._samples)
        if classes is None:
            return
        seen = [targets_of(self._samples)]
        if self._config.data.collate.target is None:  # which may change targets
            seen += [targets_in_memory(dataset) for dataset in (data.train, data.test)]
        for targets in seen:
            if targets is None or not targets.numel():
                continue
            counted = targets[targets != self._loss.ignored]
            wrong = counted[(counted < 0) | (counted >= classes)]
            if not wrong.numel():
                continue
            self.at_fault = ("model._target_", self._config.model.target)
            if int(wrong.max()) >= classes:
                count = f"{classes} class{'' if classes == 1 else 'es'}"
                raise TargetError(f"gives {count}, and targets go to {int(wrong.max())}")
            text = f"a target is {int(wrong.min())}, and cross entropy ignores"
            raise TargetError(f"{text} {self._loss.ignored} alone")

    def _require_loss(self, loss: Any, outputs: Any, caught: Sequence[Any]) -> None:
        """Refuse a loss that is no number, compares other shapes, or does not take the targets."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"has the shape {_shape(loss)}" if isinstance(loss, Tensor) else "is no tensor"
            raise TargetError(f"the loss of a batch must be one number, and {kind}")
        targets = targets_of(self._samples)
        if targets is not None and any("a target size" in str(one.message) for one in caught):
            shapes = f"outputs {_shape(logits_of(outputs))} with targets {_shape(targets)}"
            advice = f"give both the same shape{self._how_to_get_numbers()}"
            raise TargetError(f"compares {shapes}, which would be broadcast: {advice}")
        criterion = self._loss.criterion
        on_meta = isinstance(criterion, nn.Module) and len(criterion.state_dict()) > 0
        if not is_of_torch(criterion) or on_meta or returned_loss(outputs) is not None:
            return
        with torch.enable_grad(), warnings.catch_warnings(action="ignore"):
            loss = self._loss.mean(tree_map_only(Tensor, _made_up, outputs), self._samples)
            torch.autograd.backward(loss)

    def _how_to_get_numbers(self) -> str:
        targets = targets_of(self._samples)
        is_table = self._config.data.target == "runner.data.table.table"
        if not is_table or targets is None or targets.is_floating_point():
            return ""
        return "; data.classes=false makes numbers of the whole numbers in a table"

    def _read(self, data: Data) -> Any:
        """Return a batch of the first two samples."""
        try:
            samples = first_samples(data.train)
        except DataUnavailable:
            raise
        except Exception as error:
            text = f"its first two samples cannot be read: {in_one_line(error)}"
            raise DataUnavailable(text) from error
        section = self._config.data
        if section.collate.target is not None:
            self.at_fault = ("data.collate._target_", section.collate.target)
        collate = build.make_collate(section)
        self.at_fault = ("model._target_", self._config.model.target)
        try:
            return collate(samples)
        except UnequalSamples:
            raise
        except Exception as error:
            reason = _first_line(error)
            if section.collate.target is not None:
                self.at_fault = ("data.collate._target_", section.collate.target)
                raise TargetError(f"makes no batch of two samples: {reason}") from error
            text = f"two samples make no batch: {reason}; data.collate=mine.batch names a function"
            raise DataUnavailable(f"{text} of a list of samples that makes one") from error

    def refusal(self, error: Exception) -> str:
        """Return that the target does not take the samples, with their shapes."""
        shapes = []
        for part in tree_leaves(self._samples):
            if isinstance(part, Tensor) and part.ndim:
                sizes = ["B", *(str(size) for size in part.shape[1:])]
                shapes.append(f"[{', '.join(sizes)}]")
        reason = _first_line(error)
        data = self._config.data.target
        inputs = self._samples[0] if isinstance(self._samples, tuple | list) else None
        if isinstance(inputs, Tensor) and inputs.ndim == 2 and inputs.is_floating_point():
            size = inputs.shape[1]
            reason += f"; torch.nn.Linear with model.in_features={size} takes vectors of {size}"
        reason += self._how_to_get_numbers() if self.at_fault[0] == "loss._target_" else ""
        return f"does not take a sample of {data} ({', '.join(shapes)}): {reason}"


def _made_up(output: Tensor) -> Tensor:
    """Return values in the place of an output of the meta device."""
    if not output.is_floating_point():
        return torch.zeros(output.shape, dtype=output.dtype)
    values = torch.linspace(0.1, 0.9, output.numel()).reshape(output.shape)
    return values.to(output.dtype).requires_grad_()


def _shape(tensor: Tensor) -> str:
    """Return the shape of a tensor of samples, whose number is B."""
    return f"[{', '.join(['B', *(str(size) for size in tensor.shape[1:])])}]"


def _are_numbers(targets: Any) -> bool:
    if targets is None or not targets.is_floating_point():
        return False
    return targets.shape[-1] == 1 or bool((targets.sum(-1) - 1).abs().max() > 1e-3)


def _logged_keys(config: RunConfig, data: Data, compared: bool) -> Iterator[Problem]:
    names, key, watched = logged(config, data), config.sweep.objective, config.early_stopping.metric
    known = key in names or (config.telemetry.per_layer and key.startswith(keys.LAYER_NORM))
    # The objective of a single run without held-out data is the default one, which nobody chose.
    if not known and (compared or data.test is not None or not key.startswith(keys.EVAL)):
        message = f"is not logged by this run{did_you_mean(key, names)}"
        yield Problem("sweep.objective", key, f"{message} (it logs {', '.join(names)})")
    evaluated = [name for name in names if name.startswith(keys.EVAL)]
    if config.early_stopping.patience is not None and watched not in evaluated:
        message = f"is no metric of evaluations (they have {or_list(evaluated or ['none'])})"
        yield Problem("early_stopping.metric", watched, message)


def logged(config: RunConfig, data: Data) -> list[str]:
    """Return the metrics that a run logs, apart from norms of layers."""
    meter = Meter(what_if=config.clip.what_if)
    decision = Decision.untouched(torch.zeros(()), config.clip.threshold)
    meter.push(StepMetrics(1, 0.0, decision, 0.0, 1, data.tokens_per_sample or 0, 0.0), {})
    update = [keys.UPDATE_RATIO] if config.telemetry.update_ratio else []
    found = [*meter.summary()["final"], *update, keys.WALL_SECONDS]
    if data.test is None:
        return found
    metrics = (f"{keys.EVAL}{name_of(one)}" for one in config.eval.metrics)
    return [*dict.fromkeys([keys.EVAL_LOSS, keys.EVAL_ACCURACY, *metrics]), *found]
