"""From the overrides of a sweep to its jobs, its name and its folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice, product
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.composer import reason, refer_to
from runner.config.identity import digest, sweep_name
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.record import Job
from runner.config.schema import SHORT

Where: TypeAlias = Literal["here", "beside", "elsewhere"]
"""Where runs run: in the process of the command, in others of its machine, or anywhere."""

LAUNCHERS: Mapping[str, tuple[Where, str]] = {
    "BasicLauncher": ("here", ""),
    "JoblibLauncher": ("beside", "joblib"),
    "LocalLauncher": ("beside", "submitit"),
    "SlurmLauncher": ("elsewhere", "submitit"),
}
"""Launchers by the last part of their ``_target_``: where runs run, and the extra they need."""

_UNSET = "=unset"  # value in a list of ``sweep.zip`` that leaves its key out of the job


@dataclass(frozen=True)
class Sweep:
    """A sweep before it starts."""

    name: str
    folder: Path
    identity: str
    trials: int | None  # runs that a sweeper chooses as it goes; None if the jobs are listed
    lists: Mapping[str, str]  # overrides that list values, by their keys
    where: Where


def where(target: object) -> Where:
    """Return where the runs of a launcher run, by its ``_target_``."""
    return LAUNCHERS[str(target).rpartition(".")[2]][0]


def destination(config: DictConfig, kind: str) -> Path:
    """Return the folder of a run or a sweep."""
    refer_to(config)
    key = f"hydra.{kind}.dir"
    try:
        return Path(str(OmegaConf.select(config, key, throw_on_missing=True))).absolute()
    except (OmegaConfBaseException, ValueError) as error:
        text = f"cannot be resolved: {reason(error)}"
        raise RequestError([Problem(key, NOTHING, text)]) from None


def searches(master: DictConfig) -> bool:
    """Return whether a sweeper chooses the runs as it goes, as Optuna does."""
    return not str(setting(master, "hydra.sweeper._target_")).endswith(".BasicSweeper")


def placed(master: DictConfig, jobs: Sequence[Job], lists: Mapping[str, str]) -> Sweep:
    """Return the sweep of ``jobs``: its name follows from them, so that it is found again."""
    search, section = searches(master), jobs[0].config.sweep
    typed: Any = OmegaConf.to_container(master.hydra.overrides.hydra)
    settings = sorted([*typed, *lists.values()] if search else [])
    identity = digest([sorted(job.hash for job in jobs), settings])
    recipes = {job.config.recipe for job in jobs}
    recipe, keys = (
        recipes.pop() if len(recipes) == 1 else "none",
        (key.lstrip("+") for key in lists),
    )
    master.sweep.name = section.name or sweep_name(recipe, keys, identity)
    folder = destination(master, "sweep")
    master.hydra.sweep.dir = str(folder).replace("${", "\\${")
    master.hydra.output_subdir = None  # the files of Hydra's own would hold secrets
    if search and section.maximizes:
        master.hydra.sweeper.direction = "maximize"
    trials = int(setting(master, "hydra.sweeper.n_trials") or 0) if search else None
    place = where(setting(master, "hydra.launcher._target_"))
    return Sweep(master.sweep.name, folder, identity, trials, lists, place)


def setting(master: DictConfig, key: str) -> Any:
    try:
        found = OmegaConf.select(master, key)
    except OmegaConfBaseException:  # it refers to nothing, which the check of a job reports
        return None
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found


def launcher_problems(master: DictConfig) -> Iterator[Problem]:
    """Yield what is wrong with the launcher of a sweep, and the names of its folders."""
    name = str(setting(master, "hydra.launcher._target_")).rpartition(".")[2]
    choice = master.hydra.runtime.choices.get("hydra/launcher")
    extra = LAUNCHERS.get(name, ("", ""))[1]
    if name not in LAUNCHERS:
        text = f"{name} is not known here, and could not continue a sweep"
        yield Problem("hydra/launcher", choice, text)
    elif extra and find_spec(f"hydra_plugins.hydra_{extra}_launcher") is None:
        yield Problem("hydra/launcher", choice, f"needs pip install 'clip-runner[{extra}]'")
    subdir = OmegaConf.to_container(master.hydra.sweep)["subdir"]  # type: ignore[index, call-overload]
    if subdir != "${hydra.job.num}":
        text = "cannot be chosen: the runs of a sweep lie in its folder by their numbers"
        yield Problem("hydra.sweep.subdir", subdir, text)


def combined(overrides: Iterable[Override], master: DictConfig) -> Iterator[list[str]]:
    """Return the overrides of each job: every combination of the lists.

    Of a search, whose sweeper chooses as it goes, they have each value of a list once at least.
    """
    search = searches(master)
    given = setting(master, "sweep.max_jobs")
    most = given if type(given) is int and given > 0 else 1
    values: dict[str, list[list[str]]] = {}  # the overrides of each key, for each of its values
    problems = []
    for one in overrides:
        key = one.get_key_element()
        try:
            listed = _listed(one, most, search) if one.is_sweep_override() else None
            values[key] = (
                [[one.input_line or ""]] if listed is None else [[f"{key}={v}"] for v in listed]
            )
        except Exception as error:  # Hydra raises HydraException, ValueError, TypeError and more
            problems.append(Problem(key, one.get_value_string(), str(error)))
    sizes = ", ".join(f"{key} {len(one):,}" for key, one in values.items() if len(one) > 1)
    zipped = [] if search else [str(one).lstrip("+") for one in setting(master, "sweep.zip") or []]
    columns = {}  # the list of each zipped key, which may be typed for short
    for name in zipped:
        spelled = (name, f"{name}._target_", SHORT.get(name))
        columns[name] = next((key for key in values if key.lstrip("+") in spelled), "")
    counts = {name: len(values.get(key, [[]])) for name, key in columns.items()}
    if zipped and (len({*counts.values()}) > 1 or 1 in counts.values()):
        told = ", ".join(f"{name} has {count}" for name, count in counts.items())
        problems.append(Problem("sweep.zip", zipped, f"these lists must be equally long: {told}"))
    if problems:
        raise RequestError(problems)
    if zipped:
        first, *others = (key for key in values if key in columns.values())
        rows = zip(values[first], *map(values.pop, others), strict=True)
        values[first] = [[one for one in chain(*row) if not one.endswith(_UNSET)] for row in rows]
    axes = [*values.values()]
    count = max(map(len, axes), default=1) if search else prod(map(len, axes))
    if count > most:
        text = f"this sweep has {count:,} runs or more (values: {sizes}); list fewer values, or "
        raise RequestError([Problem("sweep.max_jobs", most, f"{text}raise the limit")])
    chosen = ([axis[n % len(axis)] for axis in axes] for n in range(count))
    return ([*chain(*parts)] for parts in (chosen if search else product(*axes)))


def _listed(override: Override, most: int, search: bool) -> Sequence[str]:
    """Return the values of a list, at most one more than ``most``, or both ends of an interval."""
    listed = override.value()
    if override.is_hydra_override() or override.key_or_group.partition(".")[0] == "sweep":
        raise ValueError("must be one value: all runs of a sweep share it")
    if isinstance(listed, IntervalSweep):
        if not search:
            raise ValueError("must be a list of values, or range(start,stop,step)")
        return [str(listed.start), str(listed.end)]
    if isinstance(listed, RangeSweep):  # a range may have billions of values
        first = [*islice(listed.range(), most + 1)]
        if len(first) > most:
            return [str(value) for value in first]
    found = [*override.sweep_string_iterator()]
    if not found:
        raise ValueError("must have at least one value")
    return found
