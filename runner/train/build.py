"""Make the objects of a run from its checked configuration.

Arguments that a configuration cannot hold are added: parameters, the optimizer, ``total_steps`` and
``fused``.
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from runner.booster import Booster, LossScale, Plugin
from runner.booster.criterion import Criterion
from runner.booster.loss import Loss
from runner.booster.plugin import PLUGINS, MeshSizes, SizeError
from runner.clip import ClipMode, SkipRule
from runner.clip import build as build_mode
from runner.config.environment import started_rank
from runner.config.notation import Duration
from runner.config.plugin_section import PluginSection, uses
from runner.config.schema import (
    DataSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    SchedulerSection,
)
from runner.data import Data
from runner.data.dataset import collate_pairs, is_dataset, length_of, own
from runner.gradients.units import head_weights
from runner.models.weights import load_weights
from runner.optim.groups import GroupError, parameter_groups, require_settings
from runner.parallel.collectives import is_first
from runner.parallel.compiling import compile_in_place
from runner.parallel.recompute import checkpoint_activations
from runner.telemetry.profile import Profile
from runner.telemetry.sinks import Sink
from runner.train.callbacks import EarlyStopping, Probe, SkippedSteps
from runner.train.maker import TargetError, maker, required, takes
from runner.train.model import make_on_first
from runner.train.options import Evaluate, InBackward, Log, Measurements
from runner.train.progress import Length, length
from runner.train.trainer import Trainer

log = logging.getLogger(__name__)


def device_of(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is this rank's GPU if there is one."""
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    started = started_rank()
    local_rank = 0 if started is None else started.local_rank or 0
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def make_data(config: DataSection) -> Data:
    """Make the data, once for each configuration: the preflight check and the run share it."""
    return _data(pickle.dumps(config.model_dump(by_alias=True)))


@lru_cache(maxsize=2)
def _data(section: bytes) -> Data:
    config = DataSection.model_validate(pickle.loads(section))
    make = maker(config)
    data = make()
    if is_dataset(data) and not isinstance(data, tuple | Mapping | str):
        data = own(data)
    if not isinstance(data, Data):
        kind = type(data).__name__
        raise TargetError(
            f"makes a {kind}, not a data set nor a runner.data.Data; give a function that returns "
            "one of them"
        )
    for dataset in (data.train, data.test):
        if dataset is not None:
            length_of(dataset)  # all but streams need one
    return data


def make_model(section: ModelSection, from_weights: bool = True) -> nn.Module:
    """Make the model on the host, with the weights that it starts from."""
    make = maker(section)
    model = required(nn.Module, make(), section)
    if from_weights and section.file is not None:
        loaded = load_weights(model, section.file, section.strict, section.leave_out)
        if is_first():
            level = logging.WARNING if loaded.difference else logging.INFO
            log.log(level, "model.weights: %s", loaded)
    return model


def change_passes(model: nn.Module, config: RunConfig) -> None:
    """Let a model compute activations again, and compile it, where the configuration says so."""
    if config.checkpointed_blocks:
        checkpoint_activations(model, config.checkpointed_blocks)
    if config.compile.name != "none":
        blocks = config.compile.name == "blocks"
        compile_in_place(model, blocks, **config.compile.options)


def make_collate(config: DataSection) -> Callable[[Any], Any]:
    """Return what makes a batch of a list of samples."""
    if config.collate.target is None:
        return collate_pairs
    make = maker(config.collate)
    return make() if isinstance(make.func, type) else make


def make_criterion(config: LossSection) -> Criterion | None:
    """Make the criterion; None if the configuration names none."""
    if config.target is None:
        return None
    make = maker(config)
    return make() if isinstance(make.func, type) else make


def make_optimizers(target: OptimizerSection, model: nn.Module) -> list[Optimizer]:
    """Make the optimizers of a run, in their fused form where they have one."""
    make = maker(target)
    takes_model = takes(make, "model")
    patterns = target.groups or {}
    drops_decay = target.no_decay == "auto"
    has_groups = bool(patterns) or drops_decay
    if takes_model and has_groups:
        raise GroupError(f"{target.target} makes its groups itself, from the model")
    if takes_model:
        optimizers = _fused(make, _of_model(make, model))
    else:
        parameters: list[Any] = list(model.parameters())
        if has_groups:
            parameters = parameter_groups(model, patterns, drops_decay)
        optimizers = _fused(make, partial(_over, make, parameters))
    if not (takes_model and isinstance(optimizers, list | tuple) and optimizers):
        optimizers = [optimizers]
    for optimizer in optimizers:
        require_settings(required(Optimizer, optimizer, target), patterns, drops_decay)
    return list(optimizers)


def _of_model(make: partial[Any], model: nn.Module) -> partial[Any]:
    """Bind the model, and the weights of its heads, to what makes optimizers of them."""
    if takes(make, "heads"):
        return partial(make, model=model, heads=head_weights(model))
    return partial(make, model=model)


def _fused(target: partial[Any], make: Callable[..., Any]) -> Any:
    """Call ``make``, for the fused form where the target has one for this device and options."""
    if takes(target, "fused"):
        with suppress(RuntimeError):  # Not supported on this device or with these options.
            return make(fused=True)
    return make()


def _over(make: partial[Any], parameters: Sequence[Any], **arguments: Any) -> Any:
    """Make an optimizer of parameters or groups; it writes its defaults into the groups."""
    copies = [dict(item) if isinstance(item, dict) else item for item in parameters]
    return make(copies, **arguments)


def make_scheduler(target: SchedulerSection, optimizer: Optimizer, run: Length | None) -> Any:
    """Make the scheduler of ``optimizer``; its ``total_steps`` are the steps of the run.

    Of a schedule by samples, they are the microbatches of the run.
    """
    make = maker(target)
    by_samples = target.by == "samples"
    options = {}
    if takes(make, "total_steps"):
        options["total_steps"] = _total_steps(target, run)
    scheduler = make(optimizer, **options)
    if by_samples:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TargetError("follows evaluations, not samples: leave scheduler.by out")
        scheduler.by_samples = True
    return scheduler


def _total_steps(target: SchedulerSection, run: Length | None) -> int:
    if run is None:
        raise TargetError(
            f"{target.target} needs the number of steps: give train.max_duration in ba or sp "
            "(a stream has epochs of unknown length)"
        )
    return run.microbatches if target.by == "samples" else run.steps


def make_callbacks(config: RunConfig) -> list[object]:
    """Make the callbacks that a configuration asks for."""
    callbacks: list[object] = []
    if config.early_stopping.patience is not None:
        callbacks.append(EarlyStopping(**config.early_stopping.model_dump()))
    for target in config.callbacks:
        make = maker(target)
        callbacks.append(make())
    if config.telemetry.probe:
        callbacks.append(Probe(config.telemetry.probe))
    return callbacks


def make_plugin(config: RunConfig) -> Plugin:
    """Make the plugin, with the options that it uses."""
    kind, options = plugin_of(config.plugin)
    return kind(**options)


def plugin_of(plugin: PluginSection) -> tuple[type[Plugin], dict[str, Any]]:
    """Return the class of the plugin, and the options of section ``plugin`` that it uses."""
    name = plugin.name
    options = {key: getattr(plugin, key) for key, (_, users) in uses().items() if name in users}
    return PLUGINS[name], options


def steps_of(config: RunConfig, data: Data, data_size: int | None = None) -> int | None:
    """Return the optimizer steps of a run; None if the length of its data is unknown."""
    run = run_length(config, data, data_size)
    return None if run is None else run.steps


def run_length(config: RunConfig, data: Data, data_size: int | None = None) -> Length | None:
    """Return the steps and microbatches of a run; None if the length of its data is unknown."""
    samples = length_of(data.train)
    microbatch = config.data.batch_size * (data_size or data_parts(config))
    if config.data.drop_last and samples is not None:
        samples -= samples % microbatch
    epoch = None if samples is None else max(samples, 1)
    duration = config.train.max_duration
    phases = config.accumulation.phases
    return length(duration, epoch, microbatch, data.tokens_per_sample, phases)


def data_parts(config: RunConfig) -> int:
    """Return the data-parallel size of a run."""
    return data_parallel_size(config.plugin, ranks_of(config))


def data_parallel_size(plugin: PluginSection, ranks: int) -> int:
    """Return the data-parallel size on ``ranks`` ranks; all ranks if the sizes do not fit them."""
    try:
        return mesh_of(plugin, ranks).dp
    except SizeError:
        return ranks


def mesh_of(plugin: PluginSection, ranks: int) -> MeshSizes:
    """Return the sizes of the mesh of a plugin; a SizeError if they do not fit the ranks."""
    dp = 1 if plugin.name == "single" else plugin.dp_size
    return MeshSizes.of(ranks, dp, plugin.tp_size, plugin.pp_size, plugin.ep_size)


def ranks_of(config: RunConfig) -> int:
    """Return the world size of a run that this process starts or belongs to."""
    started = started_rank()
    if started is not None:
        return started.world_size
    plugin = config.plugin
    least = plugin.least_ranks
    if not plugin.may_grow or config.device == "cpu":
        return least
    gpus = torch.cuda.device_count() * (plugin.nnodes or 1)
    return max(least, gpus - gpus % least)


def make_trainer(
    config: RunConfig,
    sinks: Sequence[Sink],
    *,
    mode: ClipMode | None = None,
    max_duration: Duration | None = None,
    evaluates: bool = True,
    callbacks: Sequence[object] = (),
    profile: Profile | None = None,
    from_weights: bool = True,
) -> Trainer:
    """Make everything that a run trains with, on this rank.

    Args:
        config: the checked configuration.
        sinks: where rows go; none on other ranks than the first.
        mode: a clipping mode in place of the configured one.
        max_duration: in place of the configured one.
        evaluates: whether there is held-out data.
        callbacks: further callbacks.
        profile: what profiles some of the steps.
        from_weights: whether to load ``model.weights``; a checkpoint that is loaded later has all.
    """
    device = device_of(config.device)
    plugin = make_plugin(config)
    data = make_data(config.data)
    model = _make_model(config, plugin, device, from_weights)
    change_passes(model, config)
    # All ranks have the same weights; from now on each data-parallel rank drops other activations.
    rank_seed = config.seed + 1_000_003 * (plugin.data_rank + 1)
    torch.manual_seed(rank_seed)
    # Transforms and models of a user may draw from these.
    random.seed(rank_seed)
    np.random.seed(rank_seed % 2**32)
    criterion = make_criterion(config.loss)
    if isinstance(criterion, nn.Module):
        criterion.to(device)
    optimizers = make_optimizers(config.optimizer, model)
    run = run_length(config, data, plugin.data_size)
    prepare = partial(
        plugin.prepare_dataloader,
        batch_size=config.data.batch_size,
        num_workers=config.data.num_workers,
        seed=config.seed,
        collate_fn=make_collate(config.data),
        pin_memory=device.type == "cuda",
        timeout=config.launch.timeout if config.data.num_workers else 0,
    )
    shuffles = length_of(data.train) is not None
    held_out = None if data.test is None or not evaluates else prepare(data.test)
    telemetry = config.telemetry
    trainer = Trainer(
        model,
        prepare(data.train, shuffle=shuffles, drop_last=config.data.drop_last),
        max_duration or config.train.max_duration,
        _algorithm(config) if mode is None else mode,
        Evaluate(held_out, config.eval.metrics, config.eval.interval),
        optimizers,
        [make_scheduler(config.scheduler, optimizer, run) for optimizer in optimizers],
        Loss(criterion, config.loss.items),
        booster=_booster(config, plugin, skips=mode is None),
        accumulation_steps=config.accumulation.phases,
        log=Log(
            sinks,
            config.log.interval,
            config.log.flush,
            config.clip.what_if,
            telemetry.per_layer,
            telemetry.top,
            Measurements(telemetry.update_ratio, telemetry.noise_scale, telemetry.zeros),
            bar=False,
            profile=profile,
        ),
        callbacks=[SkippedSteps(config.clip.max_skips), *callbacks],
    )
    if config.data.leave_out.names_any:
        trainer.leave_out = config.data.leave_out
    return trainer


def _make_model(
    config: RunConfig, plugin: Plugin, device: torch.device, from_weights: bool
) -> nn.Module:
    """Make the model, equal on all ranks; on the host if ``boost`` gives each rank its part."""
    make = partial(make_model, config.model, from_weights)
    random.seed(config.seed)
    np.random.seed(config.seed)
    if not (plugin.splits_model and plugin.world_size > 1):
        torch.manual_seed(config.seed)
        return make().to(device)
    plugin.device = device
    model, reason = make_on_first(make, config.seed)
    if reason and plugin.rank == 0:
        log.warning("every rank makes the whole model before it keeps its part: %s", reason)
    return model


def _algorithm(config: RunConfig) -> ClipMode | InBackward:
    clip = config.clip
    mode = build_mode(clip.options)
    return InBackward(mode, clip.step_in_backward) if clip.when == "backward" else mode


def _booster(config: RunConfig, plugin: Plugin, skips: bool) -> Booster:
    precision = config.precision
    loss_scale = None
    if precision.name == "fp16":
        loss_scale = LossScale(precision.initial_scale, precision.growth_interval)
    skip = None
    if skips and config.clip.skip.rule is not None:
        skip = SkipRule(**dict(config.clip.skip))
    return Booster(precision.name, plugin, loss_scale, config.clip.nonfinite, skip)
