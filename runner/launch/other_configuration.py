"""Compare the configuration of a run with that of the checkpoint that it continues from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.checkpoint.folder import manifest_of
from runner.config.identity import ENVIRONMENT, differences
from runner.config.plugin_section import PluginSection
from runner.config.problem import MISSING, NOTHING, Problem, shown
from runner.config.schema import RunConfig
from runner.config.sizes import data_parallel_size
from runner.run_folder.strict_json import decode, encode

_BATCH = ("data.batch_size", "accumulation.steps")

_CLASS = "optimizer._target_"


def problems(config: RunConfig, plain: Mapping[str, Any], checkpoint: Path) -> list[Problem]:
    """Return a problem, with both values, for each key in which a run differs from a checkpoint."""
    manifest, forced = manifest_of(checkpoint), config.resume.force
    force = "resume.force=true continues all the same"
    where = f"the checkpoint {checkpoint.parent.parent.name}/{checkpoint.name}"
    saved = manifest.get("config")
    if not isinstance(saved, dict):
        message = f"does not say its configuration; {force}"
        return [] if forced else [Problem("resume", str(checkpoint), message)]
    differing = differences(saved, decode(encode(dict(plain))))
    if forced:
        differing = {key: pair for key, pair in differing.items() if key == _CLASS}
        return _problems(differing, where, where)
    before, now = _samples(saved, manifest.get("world_size")), _samples_of(config)
    if before == now:
        differing = {key: pair for key, pair in differing.items() if key not in _BATCH}
    elif before is not None and not differing.keys() & {*_BATCH}:
        message = (
            f"a step would have {now} samples over all ranks, and {before} in {where}; {force}"
        )
        return [Problem(_BATCH[0], config.data.batch_size, message)]
    return _problems(differing, f"{where}; {force}", where)


def _problems(
    differing: Mapping[str, tuple[Any, Any]], where: str, checkpoint: str
) -> list[Problem]:
    """Return the problem of each key that has another value in a checkpoint."""
    found = []
    for key, (old, value) in differing.items():
        if key.startswith(f"{ENVIRONMENT}."):
            message = f"comes from the environment, and had another value in {where}"
            found.append(Problem(key.removeprefix(f"{ENVIRONMENT}."), NOTHING, message))
            continue
        before = "is not given" if old == MISSING else f"is {shown(old)}"
        end = f"{checkpoint}; its state cannot be used" if key == _CLASS else where
        now = "(not given)" if value == MISSING else value
        found.append(Problem(key, now, f"{before} in {end}"))
    return found


def _samples_of(config: RunConfig) -> int:
    """Return the number of samples of an optimizer step, over all ranks."""
    from runner.train import build

    return config.data.batch_size * config.accumulation.steps * build.data_parts(config)


def _samples(saved: Mapping[str, Any], world_size: object) -> int | None:
    """Return the same of a recorded configuration; None if it does not tell."""
    try:
        plugin = PluginSection.model_validate(saved["plugin"])
        batch, steps = saved["data"]["batch_size"], saved["accumulation"]["steps"]
    except (KeyError, TypeError, ValueError):
        return None
    if not (isinstance(batch, int) and isinstance(steps, int) and isinstance(world_size, int)):
        return None
    return batch * steps * data_parallel_size(plugin, world_size)
