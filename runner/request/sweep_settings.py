"""What a composition says about its folder, and about the sweeper and the launcher of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from runner.config.ordinary import show_path
from runner.config.problem import NOTHING, Problem, RequestError
from runner.request.composition import reason

Place: TypeAlias = Literal["here", "beside", "elsewhere"]
"""Where runs run: in the process of the command, in others of its machine, or anywhere."""

LAUNCHERS: Mapping[str, Place] = {
    "BasicLauncher": "here",
    "JoblibLauncher": "beside",
    "LocalLauncher": "beside",
    "SlurmLauncher": "elsewhere",
}
"""Where the runs of a launcher run, by the last part of its ``_target_``."""


def setting(shared: DictConfig, key: str) -> Any:
    """Return the value of a key in plain containers; None if it refers to nothing."""
    try:
        value = OmegaConf.select(shared, key)
    except OmegaConfBaseException:  # the check of a job reports it
        return None
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def unresolved_settings(config: DictConfig) -> Iterator[Problem]:
    """Yield what Hydra would read of its own part as it runs a job, and that refers to nothing."""
    # override_dirname repeats the overrides, whose own keys are named where they are wrong.
    of_job = [f"job.{name}" for name in config.hydra.job if name != "override_dirname"]
    for name in ("mode", "verbose", *of_job, "job_logging", "hydra_logging", "help"):
        key = f"hydra.{name}"
        try:
            value = OmegaConf.select(config, key)
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True)
        except InterpolationToMissingValueError:  # such as a folder, which is not chosen yet
            continue
        except OmegaConfBaseException as error:
            yield Problem(key, NOTHING, f"cannot be resolved: {reason(error)}")


def searches(shared: DictConfig) -> bool:
    """Return whether the sweeper chooses runs by the results of earlier ones, as Optuna does."""
    return not str(setting(shared, "hydra.sweeper._target_")).endswith(".BasicSweeper")


def place_of(shared: DictConfig) -> Place:
    """Return where the launcher of a sweep runs its runs."""
    return LAUNCHERS[setting(shared, "hydra.launcher._target_").rpartition(".")[2]]


def destination(config: DictConfig, kind: Literal["run", "sweep"]) -> Path:
    """Return the folder of a run or a sweep."""
    key = f"hydra.{kind}.dir"
    try:
        path = Path(str(OmegaConf.select(config, key, throw_on_missing=True))).absolute()
    except (OmegaConfBaseException, ValueError) as error:
        problem = Problem(key, NOTHING, f"cannot be resolved: {reason(error)}")
        raise RequestError([problem]) from None
    show_path(path)
    return path


def launcher_problems(shared: DictConfig) -> Iterator[Problem]:
    """Yield what is wrong with the launcher of a sweep, and the names of its folders."""
    target = str(setting(shared, "hydra.launcher._target_")).split(".")
    choice = str(shared.hydra.runtime.choices.get("hydra/launcher"))
    if target[-1] not in LAUNCHERS:
        message = f"{target[-1]} is not known here, and could not continue a sweep"
        yield Problem("hydra/launcher", choice, message)
    elif find_spec(".".join(target[:2])) is None:
        message = f"needs pip install 'clip-runner[{choice.partition('_')[0]}]'"
        yield Problem("hydra/launcher", choice, message)
    if target[-1] == "SlurmLauncher":
        message = "must be 1: a run of a sweep is one task, which starts its ranks (plugin.nproc)"
        for key in ("nodes", "tasks_per_node"):
            count = setting(shared, f"hydra.launcher.{key}")
            if count not in (1, None):
                yield Problem(f"hydra.launcher.{key}", count, message)
    subdir = OmegaConf.to_container(shared.hydra.sweep)["subdir"]  # type: ignore[index, call-overload]
    if subdir != "${hydra.job.num}":
        message = "cannot be chosen: the runs of a sweep lie in its folder by their numbers"
        yield Problem("hydra.sweep.subdir", subdir, message)
