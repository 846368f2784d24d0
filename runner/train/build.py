"""Make the objects of a run from its checked configuration, and run it on one rank.

Arguments that a configuration cannot hold are added: parameters, the optimizer, ``total_steps`` and
``fused``.
"""

from __future__ import annotations

import inspect
import logging
import math
import pickle
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import yaml
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn
from torch.optim import Optimizer

from runner.booster import Booster, LossScale, Plugin
from runner.booster.loss import Criterion, Loss
from runner.booster.plugin import PLUGINS, MeshSizes, SizeError
from runner.checkpoint.content import CheckpointSaver, load_weights
from runner.checkpoint.folder import manifest_of
from runner.clip import ClipMode, SkipRule
from runner.clip import build as build_mode
from runner.clip.units import head_weights
from runner.config.environment import started_rank
from runner.config.identity import branching
from runner.config.modes import MODES
from runner.config.notation import Duration, plural
from runner.config.plugin_section import PluginSection, uses
from runner.config.problem import did_you_mean, leaves
from runner.config.schema import DataSection, LossSection, RunConfig
from runner.config.section import Target
from runner.data import Data
from runner.data.dataset import length_of
from runner.run_folder import files, keys
from runner.run_folder.strict_json import decode, encode, read_object
from runner.telemetry import guidance
from runner.telemetry.sinks import Sink
from runner.telemetry.sinks.console import print_line
from runner.train.callbacks import EarlyStopping, Probe, SkippedSteps
from runner.train.progress import total_steps
from runner.train.trainer import Evaluate, InBackward, Log, Measurements, Trainer

log = logging.getLogger(__name__)

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
    given = {  # without arguments whose class is null, as ``eval`` of data=own
        name: one
        for name, one in target.mapping().items()
        if not isinstance(one, Mapping) or one.get("_target_", name) is not None
    }
    try:
        made = instantiate(given, _partial_=True, _convert_="all")
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
    return _data(pickle.dumps(config.model_dump(by_alias=True)))


@lru_cache(maxsize=2)
def _data(section: bytes) -> Data:
    config = DataSection.model_validate(pickle.loads(section))
    data = _require(Data, maker(config)(), config)
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
    used = [key for key, (_, plugins) in uses().items() if name in plugins]
    return PLUGINS[name], {key: getattr(config.plugin, key) for key in used}


def steps_of(config: RunConfig, data: Data, data_size: int | None = None) -> int | None:
    samples, microbatch = length_of(data.train), config.data.batch_size
    microbatch *= data_size or data_parts(config)
    if config.data.drop_last and samples is not None:
        samples -= samples % microbatch
    epoch = None if samples is None else max(samples, 1)
    step = microbatch * config.accumulation.steps
    return total_steps(config.train.max_duration, epoch, step, data.tokens_per_sample)


def samples_of(config: RunConfig) -> tuple[int | None, int]:
    """Return the samples of the training data, None of a stream, and those a step asks for."""
    asked = config.data.batch_size * config.accumulation.steps * data_parts(config)
    return length_of(make_data(config.data).train), asked


def data_parts(config: RunConfig) -> int:
    return data_parallel_size(config.plugin, ranks_of(config))


def data_parallel_size(plugin: PluginSection, ranks: int) -> int:
    """Return the data-parallel size on ``ranks`` ranks; all ranks if the sizes do not fit them."""
    try:
        return mesh_of(plugin, ranks).dp
    except SizeError:
        return ranks


def mesh_of(plugin: PluginSection, ranks: int) -> MeshSizes:
    dp = 1 if plugin.name == "single" else plugin.dp_size
    return MeshSizes.of(ranks, dp, plugin.tp_size, plugin.pp_size, plugin.ep_size)


def ranks_of(config: RunConfig) -> int:
    """Return the world size of a run that this process starts or belongs to."""
    if (started := started_rank()) is not None:
        return started.world_size
    plugin, least = config.plugin, config.plugin.least_ranks
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count() * (plugin.nnodes or 1)
    return max(least, gpus - gpus % least) if plugin.may_grow else least


def execute(
    config: RunConfig,
    sinks: Sequence[Sink],
    *,
    folder: Path | None = None,
    resume: Path | None = None,
) -> dict[str, Any]:
    started = time.perf_counter()
    recorded, file = None, None if folder is None else folder / files.CONFIG
    if file is not None and file.is_file():  # masked where it is secret
        recorded = decode(encode(yaml.safe_load(file.read_text(encoding="utf-8"))))
    callbacks, saved = make_callbacks(config), config.checkpoint
    if folder is not None and (saved.keep or saved.save_final):
        status = read_object(folder / files.STATUS)
        about = {key: status.get(key) for key in ("config_hash", "wandb_run_id")}
        saver = CheckpointSaver(
            folder / files.CHECKPOINTS,
            saved.interval,
            keep=saved.keep,
            best=config.sweep.objective if saved.keep_best else None,
            maximizes=config.sweep.maximizes,
            save_final=saved.save_final,
            asynchronous=None if saved.asynchronous == "auto" else saved.asynchronous,
            about={"config": recorded, "plugin": config.plugin.name, **about},
        )
        callbacks.append(saver)
    trainer = make_trainer(config, sinks, callbacks=callbacks)
    if trainer.plugin.rank == 0:
        samples = length_of(make_data(config.data).train)
        line = f"{trainer.device}, {plural(trainer.plugin.world_size, 'rank')} "
        counted = "a stream" if samples is None else f"{samples:,} samples"
        line += f"(plugin={config.plugin.name}), {counted}, "
        line += f"{trainer.parameters:,} parameters, {folder or 'no record'}"
        log.info("training: %s", line)
        print_line(f"clip-runner: {line}", sys.stderr)
    if resume is not None:
        keep = _changed(manifest_of(resume).get("config"), recorded)
        if branching(config.resume.source) and folder and not resume.is_relative_to(folder):
            keep.add("metrics")  # those of a branch begin with it
        trainer.load(resume, verify=False, keep=keep)
    summary = trainer.fit()
    clip, info, layout = config.clip, config.clip.info, trainer.optimizer.layout
    some = trainer.state.mode.scales_some(layout)
    scaled = [one for one in layout.parameters.values() if one.scaled or not some]
    elements = sum(math.prod(one.shape) for one in scaled)
    effect = guidance.effect_of(trainer.optimizer.optimizers, clip.threshold, elements, some)
    searches = trainer.skipped_steps.searches
    setting = guidance.Setting(info, clip.threshold, clip.nonfinite, effect, searches)
    known = clip.mode in MODES and info == MODES[clip.mode].info
    return {
        **summary,
        **({} if known else {keys.CLIP_MODE: asdict(info)}),
        "remarks": [asdict(remark) for remark in guidance.remarks(summary, setting)],
        keys.WALL_SECONDS: time.perf_counter() - started,
        "parameters": trainer.parameters,
        "world_size": trainer.plugin.world_size,
        "device": str(trainer.device),
    }


def evaluate(
    config: RunConfig, sinks: Sequence[Sink], *, checkpoint: Path | None
) -> dict[str, Any]:
    """Evaluate a checkpoint on the held-out data; every rank has to call this."""
    for sink in sinks:
        sink.close(None, 0)
    trainer = make_trainer(config, ())
    load_weights(trainer, checkpoint)
    return {"metrics": trainer.evaluate(), "world_size": trainer.plugin.world_size}


def _changed(saved: object, recorded: dict[str, Any] | None) -> set[str]:
    """Return the settings that a checkpoint must not bring, as this run was given others."""
    if not isinstance(saved, dict) or recorded is None:
        return set()
    before, now = (dict(leaves("", one)) for one in (saved, recorded))
    changed = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    own = {key.removeprefix("optimizer.") for key in changed if key.startswith("optimizer.")}
    own |= {key.removeprefix("adamw_") for key in own}  # those of AdamW beside Muon
    of_schedule = ("scheduler.", "train.max_duration", "data.", "accumulation.")
    if any(key.startswith(of_schedule) for key in changed):
        own.add("lr")
    measured = {"clip.mode", "clip._target_", "clip.window"}
    if now.get("clip.mode") != "schedule":  # its history is a step, which goes on
        measured |= {"clip.norm_type", "clip.scales"}
    if measured & changed:
        own.add("mode")
    thresholds = ("clip.threshold", "clip.links", "clip.groups")
    return own | ({"threshold"} if any(key.startswith(thresholds) for key in changed) else set())


def make_trainer(
    config: RunConfig,
    sinks: Sequence[Sink],
    *,
    mode: ClipMode | None = None,
    max_duration: Duration | None = None,
    evaluates: bool = True,
    callbacks: Sequence[object] = (),
) -> Trainer:
    device, plugin = device_of(config.device), make_plugin(config)
    data = make_data(config.data)
    # All ranks draw the same weights; then each data-parallel rank drops other activations.
    torch.manual_seed(config.seed)
    model = maker(config.model)().to(device)
    own_seed = config.seed + 1_000_003 * (plugin.data_rank + 1)
    torch.manual_seed(own_seed)
    # Transforms and models of a user may draw from these.
    random.seed(own_seed)
    np.random.seed(own_seed % 2**32)
    criterion = make_criterion(config.loss)
    if isinstance(criterion, nn.Module):
        criterion.to(device)
    optimizers = make_optimizers(config.optimizer, model)
    steps = steps_of(config, data, plugin.data_size)
    prepare = partial(
        plugin.prepare_dataloader,
        batch_size=config.data.batch_size,
        num_workers=config.data.num_workers,
        seed=config.seed,
        pin_memory=device.type == "cuda",
        timeout=config.launch.timeout if config.data.num_workers else 0,
    )
    shuffles = length_of(data.train) is not None
    train = prepare(data.train, shuffle=shuffles, drop_last=config.data.drop_last)
    held_out = None if data.test is None or not evaluates else prepare(data.test)
    clip, precision, telemetry = config.clip, config.precision, config.telemetry
    fp16, early = precision.name == "fp16", clip.when == "backward"
    scale = LossScale(precision.initial_scale, precision.growth_interval) if fp16 else None
    skips = clip.skip.rule is not None and mode is None
    skip = SkipRule(**dict(clip.skip)) if skips else None
    clips = mode or build_mode(clip.kind, **clip.options)
    return Trainer(
        model,
        train,
        max_duration or config.train.max_duration,
        InBackward(clips, clip.step_in_backward) if early and mode is None else clips,
        Evaluate(held_out, config.eval.metrics, config.eval.interval),
        optimizers,
        [make_scheduler(config.scheduler, each, steps) for each in optimizers],
        Loss(criterion, config.loss.items),
        booster=Booster(precision.name, plugin, scale, clip.nonfinite, skip),
        accumulation_steps=config.accumulation.steps,
        log=Log(
            sinks,
            config.log.interval,
            config.log.flush,
            clip.what_if,
            telemetry.per_layer,
            Measurements(telemetry.update_ratio, telemetry.noise_scale),
            bar=False,
        ),
        callbacks=[SkippedSteps(clip.max_skips), *callbacks],
    )
