"""Train or evaluate one run on this rank, from its checked configuration."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from runner.checkpoint.content import CheckpointSaver, load_weights
from runner.checkpoint.folder import manifest_of
from runner.clip.groups import leaves_out
from runner.config.identity import branching
from runner.config.modes import MODES
from runner.config.notation import Duration, plural
from runner.config.problem import leaves
from runner.config.schema import RunConfig
from runner.data.dataset import length_of
from runner.run_folder import files, keys
from runner.run_folder.strict_json import decode, encode, read_object
from runner.telemetry import guidance
from runner.telemetry.profile import Profile
from runner.telemetry.sinks import Sink
from runner.telemetry.sinks.console import print_line
from runner.train.build import device_of, make_callbacks, make_data, make_trainer
from runner.train.communication import gradients_sent
from runner.train.trainer import Trainer

log = logging.getLogger(__name__)

SHARE_OF_MEMORY = 0.95  # of a device that accumulation=auto may use: evaluations and longer samples


def execute(
    config: RunConfig,
    sinks: Sequence[Sink],
    *,
    folder: Path | None = None,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Train; return the summary. Every rank calls this.

    Args:
        config: the checked configuration.
        sinks: where rows go; none on other ranks than the first.
        folder: the run's folder; None for a run that is not recorded.
        resume: the checkpoint to continue from.
    """
    started = time.perf_counter()
    recorded = None if folder is None else _recorded(folder)
    callbacks = make_callbacks(config)
    if folder is not None and (config.checkpoint.keep or config.checkpoint.save_final):
        callbacks.append(_saver(config, folder, recorded))
    trainer = make_trainer(
        config,
        sinks,
        callbacks=callbacks,
        profile=_profile(config, folder),
        from_weights=resume is None,
    )
    if trainer.plugin.rank == 0:
        _announce(trainer, config, folder)
    if resume is not None:
        keep = _settings_to_keep(manifest_of(resume).get("config"), recorded)
        if branching(config.resume.source) and folder and not resume.is_relative_to(folder):
            keep.add("metrics")  # a branch counts from its beginning
        trainer.load(resume, verify=False, keep=keep)
    summary = trainer.fit()
    summary["remarks"] = _remarks(trainer, config, summary)
    info = config.clip.info
    if config.clip.mode not in MODES or info != MODES[config.clip.mode].info:
        summary[keys.CLIP_MODE] = asdict(info)  # a reader of the record cannot know it otherwise
    summary[keys.WALL_SECONDS] = time.perf_counter() - started
    summary["parameters"] = trainer.parameters
    summary["world_size"] = trainer.plugin.world_size
    summary["device"] = str(trainer.device)
    return summary


def evaluate(
    config: RunConfig, sinks: Sequence[Sink], *, checkpoint: Path | None
) -> dict[str, Any]:
    """Evaluate a checkpoint on the held-out data; every rank has to call this."""
    for sink in sinks:
        sink.close(None, 0)
    trainer = make_trainer(config, (), from_weights=False)
    load_weights(trainer, checkpoint)
    return {"metrics": trainer.evaluate(), "world_size": trainer.plugin.world_size}


def try_steps(config: RunConfig, sinks: Sequence[Sink]) -> dict[str, Any]:
    """Take the first steps of a run, and keep nothing of them; every rank calls this.

    The first step allocates the state of the optimizer, so that the second one has the most memory.
    """
    device = device_of(config.device)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(SHARE_OF_MEMORY, device)
    # fp16: a first step that overflows would allocate nothing
    precision = config.precision.model_copy(update={"initial_scale": 1.0})
    config = config.model_copy(update={"precision": precision})
    make_trainer(config, (), max_duration=Duration(2, "ba"), evaluates=False).fit()
    return {}


def _recorded(folder: Path) -> dict[str, Any] | None:
    """Return the configuration as the run's folder has it, masked where it is secret."""
    file = folder / files.CONFIG
    if not file.is_file():
        return None
    recorded: dict[str, Any] = decode(encode(yaml.safe_load(file.read_text(encoding="utf-8"))))
    return recorded


def _profile(config: RunConfig, folder: Path | None) -> Profile | None:
    """Return what profiles the steps that were asked for, on the first rank."""
    if config.telemetry.profile is None or folder is None:
        return None
    if dist.is_initialized() and dist.get_rank() > 0:
        return None
    first, last = config.telemetry.profile.split(":")
    return Profile(int(first), int(last), folder / files.PROFILE)


def _saver(config: RunConfig, folder: Path, recorded: dict[str, Any] | None) -> CheckpointSaver:
    section = config.checkpoint
    status = read_object(folder / files.STATUS)
    microbatches = status.get(keys.ACCUMULATION_STEPS)
    about_steps = {} if microbatches is None else {keys.ACCUMULATION_STEPS: microbatches}
    return CheckpointSaver(
        folder / files.CHECKPOINTS,
        section.interval,
        keep=section.keep,
        best=config.sweep.objective if section.keep_best else None,
        maximizes=config.sweep.maximizes,
        save_final=section.save_final,
        asynchronous=None if section.asynchronous == "auto" else section.asynchronous,
        about={
            "config": recorded,
            "plugin": config.plugin.name,
            "config_hash": status.get("config_hash"),
            "wandb_run_id": status.get("wandb_run_id"),
            **about_steps,
        },
    )


def _announce(trainer: Trainer, config: RunConfig, folder: Path | None) -> None:
    samples = length_of(make_data(config.data).train)
    ranks = plural(trainer.plugin.world_size, "rank")
    data = "a stream" if samples is None else f"{samples:,} samples"
    line = (
        f"{trainer.device}, {ranks} (plugin={config.plugin.name}), {data}, "
        f"{trainer.parameters:,} parameters, {folder or 'no record'}"
    )
    log.info("training: %s", line)
    print_line(f"clip-runner: {line}", sys.stderr)
    sent = gradients_sent(config, trainer.gradient_bytes)
    if sent:
        log.info("%s", sent)
        print_line(f"clip-runner: {sent}", sys.stderr)


def _remarks(trainer: Trainer, config: RunConfig, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return advice on the threshold, by what the optimizers make of a smaller gradient."""
    clip = config.clip
    effect = effect_in(trainer, clip.threshold)
    searches = trainer.skipped_steps.searches
    setting = guidance.Setting(clip.info, clip.threshold, clip.nonfinite, effect, searches)
    return [asdict(remark) for remark in guidance.remarks(summary, setting)]


def effect_in(trainer: Trainer, threshold: float | None) -> guidance.Effect:
    """Return what the optimizers of a training make of gradients held to ``threshold``."""
    layout = trainer.optimizer.layout
    leaves_some_out = leaves_out(trainer.state.mode, layout)
    scaled = []
    for name, parameter in layout.parameters.items():
        if not leaves_some_out or name not in layout.orthogonalized:
            scaled.append(parameter)
    return guidance.effect_of(
        trainer.optimizer.optimizers,
        threshold,
        sum(math.prod(parameter.shape) for parameter in scaled),
        leaves_some_out,
    )


_OF_GROUPS = ("optimizer.groups", "optimizer.no_decay")
_OF_SCHEDULE = ("scheduler.", "train.max_duration", "data.", "accumulation.")
_THRESHOLDS = ("clip.threshold", "clip.links", "clip.groups")
_MEASURED = ("clip.mode", "clip._target_", "clip.window")
_OF_NORMS = ("clip.norm_type", "clip.scales")


def _settings_to_keep(saved: object, recorded: dict[str, Any] | None) -> set[str]:
    """Return the settings that a checkpoint must not bring, as this run was given others."""
    if not isinstance(saved, dict) or recorded is None:
        return set()
    before = dict(leaves("", saved))
    values = dict(leaves("", recorded))
    changed = [key for key in before | values if before.get(key) != values.get(key)]
    keep = set()
    for key in changed:
        if key.startswith("optimizer."):
            name = key.removeprefix("optimizer.")
            keep |= {name, name.removeprefix("adamw_")}  # of AdamW's settings beside Muon
        if key.startswith(_OF_GROUPS):
            keep |= {"groups", "lr"}
        if key.startswith(_OF_SCHEDULE) and not key.startswith("data.leave_out"):
            keep.add("lr")
        if key.startswith(_THRESHOLDS):
            keep.add("threshold")
        if key in _MEASURED or (key in _OF_NORMS and values.get("clip.mode") != "schedule"):
            keep.add("mode")  # the memory of a schedule is the step, which goes on
    return keep
