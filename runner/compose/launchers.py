"""Launchers of Hydra that run the runs of a sweep: which are known, and what they need."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

from omegaconf import DictConfig, OmegaConf

from runner.config.problem import Problem

Where: TypeAlias = Literal["here", "beside", "elsewhere"]
"""Where runs run: in the process of the command, in others of its machine, or anywhere."""

LAUNCHERS: dict[str, tuple[Where, str]] = {
    "JoblibLauncher": ("beside", "joblib"),
    "LocalLauncher": ("beside", "submitit"),
    "SlurmLauncher": ("elsewhere", "submitit"),
}
"""Launchers by the last part of their ``_target_``: where runs run, and the extra they need."""

_BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"

_PLUGINS = "hydra_plugins."

RAY = (
    "its launcher (hydra-ray-launcher 1.2.2) cannot be installed beside this project, because it "
    "needs cloudpickle below 3: use joblib on one machine, or submitit_slurm on several"
)


def where(target: object) -> Where:
    """Return where the runs of a launcher run, by its ``_target_``."""
    return LAUNCHERS.get(str(target).rpartition(".")[2], ("here", ""))[0]


def problems(master: DictConfig | None) -> Iterator[Problem]:
    """Yield what is wrong with the launcher of a sweep, whose composition is None if it fails."""
    hydra: Any = {} if master is None else OmegaConf.to_container(master.hydra, resolve=False)
    settings = hydra.get("launcher") or {}
    choice = hydra.get("runtime", {}).get("choices", {}).get("hydra/launcher")
    target = str(settings.get("_target_"))
    if not settings or target == _BASIC:
        return
    if target.rpartition(".")[2] not in LAUNCHERS:
        message = (
            f"{target} is not known here, and could not continue a sweep  "
            "(options of hydra/launcher: basic, joblib, submitit_local, submitit_slurm)"
        )
        yield Problem("hydra/launcher", choice, message)
        return
    _, extra = LAUNCHERS[target.rpartition(".")[2]]
    if find_spec(f"{_PLUGINS}hydra_{extra}_launcher") is None:
        yield Problem("hydra/launcher", choice, f"needs pip install 'clip-runner[{extra}]'")
    for key in ("n_jobs", "array_parallelism"):
        value = settings.get(key, 1)
        if type(value) is not int or value == 0 or value < -1:
            message = "must be a positive integer, or -1 for as many as the cores allow"
            yield Problem(f"hydra.launcher.{key}", value, message)
    for key in ("nodes", "tasks_per_node"):
        if settings.get(key, 1) != 1:
            message = "must be 1: a run starts its ranks itself (plugin.nproc), on one node"
            yield Problem(f"hydra.launcher.{key}", settings[key], message)


def lacking(master: DictConfig) -> Problem | None:
    """Return the problem of a launcher whose command this machine does not have."""
    if where(master.hydra.launcher.get("_target_")) != "elsewhere" or shutil.which("sbatch"):
        return None
    message = "there is no sbatch here: run this on a machine that submits jobs to Slurm"
    return Problem("hydra/launcher", "submitit_slurm", message)
