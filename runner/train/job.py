"""Run one training job on one rank: build its objects, train, and return the summary."""

from __future__ import annotations

import logging
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

from runner.booster import Booster, LossScale
from runner.checkpoint.content import CheckpointSaver, load_weights
from runner.checkpoint.folder import manifest_of
from runner.clip import ClipMode, SkipRule
from runner.clip import build as build_mode
from runner.config.identity import branching
from runner.config.modes import MODES
from runner.config.notation import Duration, plural
from runner.config.problem import leaves
from runner.config.schema import RunConfig
from runner.data.dataset import length_of
from runner.run_folder import files, keys
from runner.run_folder.strict_json import decode, encode, read_object
from runner.telemetry import guidance
from runner.telemetry.sinks import Sink
from runner.telemetry.sinks.console import print_line
from runner.train import build
from runner.train.callbacks import SkippedSteps
from runner.train.trainer import Evaluate, InBackward, Log, Measurements, Trainer

log = logging.getLogger(__name__)

_OF_SCHEDULE = ("scheduler.", "train.max_duration", "data.", "accumulation.")
"""Keys on which the schedule of the learning rate depends."""


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
    callbacks = [*build.make_callbacks(config), *_savers(config, folder, recorded)]
    trainer = make_trainer(config, sinks, callbacks=callbacks)
    if trainer.plugin.rank == 0:
        samples = length_of(build.make_data(config.data).train)
        about = f"{trainer.device}, {plural(trainer.plugin.world_size, 'rank')} "
        counted = "a stream" if samples is None else f"{samples:,} samples"
        about += f"(plugin={config.plugin.name}), {counted}, "
        about += f"{trainer.parameters:,} parameters, {folder or 'no record'}"
        log.info("training: %s", about)
        print_line(f"clip-runner: {about}", sys.stderr)
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
    if any(key.startswith(_OF_SCHEDULE) for key in changed):
        own.add("lr")
    measured = {"clip.mode", "clip._target_", "clip.window"}
    if now.get("clip.mode") != "schedule":  # its history is a step, which goes on
        measured |= {"clip.norm_type", "clip.scales"}
    if measured & changed:
        own.add("mode")
    thresholds = ("clip.threshold", "clip.links", "clip.groups")
    return own | ({"threshold"} if any(key.startswith(thresholds) for key in changed) else set())


def _savers(
    config: RunConfig, folder: Path | None, recorded: dict[str, Any] | None
) -> list[CheckpointSaver]:
    section = config.checkpoint
    if folder is None or not (section.keep or section.save_final):
        return []
    status = read_object(folder / files.STATUS)
    about = {key: status.get(key) for key in ("config_hash", "wandb_run_id")}
    saver = CheckpointSaver(
        folder / files.CHECKPOINTS,
        section.interval,
        keep=section.keep,
        best=config.sweep.objective if section.keep_best else None,
        maximizes=config.sweep.maximizes,
        save_final=section.save_final,
        asynchronous=None if section.asynchronous == "auto" else section.asynchronous,
        about={"config": recorded, "plugin": config.plugin.name, **about},
    )
    return [saver]


def make_trainer(
    config: RunConfig,
    sinks: Sequence[Sink],
    *,
    mode: ClipMode | None = None,
    max_duration: Duration | None = None,
    evaluates: bool = True,
    callbacks: Sequence[object] = (),
) -> Trainer:
    device, plugin = build.device_of(config.device), build.make_plugin(config)
    data = build.make_data(config.data)
    # All ranks draw the same weights; then each data-parallel rank drops other activations.
    torch.manual_seed(config.seed)
    model = build.maker(config.model)().to(device)
    own_seed = config.seed + 1_000_003 * (plugin.data_rank + 1)
    torch.manual_seed(own_seed)
    # Transforms and models of a user may draw from these.
    random.seed(own_seed)
    np.random.seed(own_seed % 2**32)
    criterion = build.make_criterion(config.loss)
    if isinstance(criterion, nn.Module):
        criterion.to(device)
    optimizers = build.make_optimizers(config.optimizer, model)
    steps = build.steps_of(config, data, plugin.data_size)
    prepare = partial(
        plugin.prepare_dataloader,
        batch_size=config.data.batch_size,
        num_workers=config.data.num_workers,
        seed=config.seed,
        pin_memory=device.type == "cuda",
    )
    shuffles = length_of(data.train) is not None
    train = prepare(data.train, shuffle=shuffles, drop_last=config.data.drop_last)
    held_out = None if data.test is None or not evaluates else prepare(data.test)
    clip, precision, telemetry = config.clip, config.precision, config.telemetry
    fp16, rule, early = precision.name == "fp16", clip.skip.options, clip.when == "backward"
    scale = LossScale(precision.initial_scale, precision.growth_interval) if fp16 else None
    skip = None if rule is None or mode is not None else SkipRule(**rule)
    clips = mode or build_mode(clip.kind, **clip.options)
    return Trainer(
        model,
        train,
        max_duration or config.train.max_duration,
        InBackward(clips, clip.step_in_backward) if early and mode is None else clips,
        Evaluate(held_out, config.eval.metrics, config.eval.interval),
        optimizers,
        [build.make_scheduler(config.scheduler, each, steps) for each in optimizers],
        criterion,
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
