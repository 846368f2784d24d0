"""From the overrides of a sweep to its jobs, its name and its folder."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, islice, product
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from runner.config.composer import OPEN, Composed, Composer, exists, reason
from runner.config.folders import outputs
from runner.config.identity import digest, sweep_name
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.record import Job, checked
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

_MOST_WRONG = 10
"""Wrong jobs after which no further one is checked: most of their problems are the same."""

_UNSET = "=unset"  # value in a list of ``sweep.zip`` that leaves its key out of the job


@dataclass(frozen=True)
class Sweep:
    """A sweep before it starts."""

    name: str
    folder: Path
    identity: str
    trials: int | None  # runs that a sweeper chooses as it goes; None if the jobs are listed
    keys: tuple[str, ...]
    words: tuple[str, ...]  # overrides that all runs share, for Hydra
    lists: tuple[str, ...]  # overrides that list values, for a sweeper
    where: Where = "here"


def key_of(word: str) -> str:
    """Return the key of an override that is not parsed yet, without the signs before it."""
    return word.lstrip("+~").partition("=")[0]


def _typed(key: str) -> str:
    """Return a key as it is typed for short: ``model`` for ``+model._target_``."""
    short = {f"{section}._target_": section for section in OPEN}
    short |= {full: section for section, full in SHORT.items()}
    return short.get(key.lstrip("+"), key.lstrip("+"))


def where(target: object) -> Where:
    """Return where the runs of a launcher run, by its ``_target_``."""
    return LAUNCHERS[str(target).rpartition(".")[2]][0]


def job_of(made: Composed, folder: Path | None, number: int | None = None) -> Job:
    """Return the checked job of a composition, in its folder or as this ``number`` of a sweep."""
    config = made.config
    with read_write(config), open_dict(config), read_write(config.hydra):
        if number is not None:  # as the launcher of a sweep does
            config.hydra.job.num, config.hydra.job.id = number, number
        config.hydra.runtime.output_dir = str(folder or outputs())
    HydraConfig.instance().set_config(config)
    return checked(made)


def destination(config: DictConfig, kind: str) -> tuple[Path | None, list[Problem]]:
    """Return the folder of a run or a sweep, and why it cannot be resolved."""
    HydraConfig.instance().set_config(config)
    key = f"hydra.{kind}.dir"
    try:
        return Path(str(OmegaConf.select(config, key, throw_on_missing=True))).absolute(), []
    except (OmegaConfBaseException, ValueError) as error:
        return None, [Problem(key, NOTHING, f"cannot be resolved: {reason(error)}")]


def sweep(
    composer: Composer, made: Composed, overrides: Sequence[Override]
) -> tuple[list[Job], Sweep | None, list[Problem]]:
    """Return the jobs of a sweep, the sweep, and everything that is wrong with them.

    ``made`` is composed of the overrides that list no values.
    """
    master = made.config
    HydraConfig.instance().set_config(master)
    searches = not str(_setting(master, "hydra.sweeper._target_")).endswith(".BasicSweeper")
    params = _setting(master, "hydra.sweeper.params") or {}
    listed, problems = composer.read(f"{key}={value}" for key, value in params.items())
    overrides = [*listed, *overrides]
    problems += [*_launcher_problems(master), *destination(master, "sweep")[1]]
    values: dict[str, list[str]] = {}
    combined: Iterable[Sequence[str]]
    try:
        values, combined = _combined(overrides, master, searches)
    except RequestError as error:  # the other overrides are checked too
        problems += error.problems
        combined = [[one.input_line or "" for one in overrides if not one.is_sweep_override()]]
    jobs: list[Job] = []
    wrong = 0
    for number, words in enumerate(combined):
        try:
            job = job_of(composer.compose(composer.read(words)[0]), None, number)
            apart = [one for one in words if len(values.get(one.partition("=")[0], "")) > 1]
            jobs.append(replace(job, apart=tuple(apart)))
        except RequestError as error:
            problems += error.problems
            wrong += 1
            if wrong == _MOST_WRONG:
                break
    if problems or not jobs:
        return jobs, None, problems
    return jobs, _placed(master, made.words, overrides, jobs, searches), []


def _setting(master: DictConfig, key: str) -> Any:
    try:
        found = OmegaConf.select(master, key)
    except OmegaConfBaseException:  # it refers to nothing, which the check of a job reports
        return None
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found


def _launcher_problems(master: DictConfig) -> Iterator[Problem]:
    """Yield what is wrong with the launcher of a sweep, and the names of its folders."""
    name = str(_setting(master, "hydra.launcher._target_")).rpartition(".")[2]
    choice = (_setting(master, "hydra.runtime.choices") or {}).get("hydra/launcher")
    if name not in LAUNCHERS:
        text = f"{name} is not known here, and could not continue a sweep"
        yield Problem("hydra/launcher", choice, text)
    extra = LAUNCHERS.get(name, ("", ""))[1]
    if extra and find_spec(f"hydra_plugins.hydra_{extra}_launcher") is None:
        yield Problem("hydra/launcher", choice, f"needs pip install 'clip-runner[{extra}]'")
    written: Any = OmegaConf.to_container(master.hydra.sweep, resolve=False)
    if written["subdir"] != "${hydra.job.num}":
        text = "cannot be chosen: the runs of a sweep lie in its folder by their numbers"
        yield Problem("hydra.sweep.subdir", written["subdir"], text)


def _combined(
    overrides: Sequence[Override], master: DictConfig, searches: bool
) -> tuple[dict[str, list[str]], Iterable[list[str]]]:
    """Return the overrides of each key, and those of each job: every combination of the lists.

    Of a search, whose sweeper chooses as it goes, one job for each value stands for all.
    """
    zipped = [] if searches else [str(key) for key in _setting(master, "sweep.zip") or []]
    given = _setting(master, "sweep.max_jobs")
    most = given if type(given) is int and given > 0 else 1
    values: dict[str, list[str]] = {}
    problems = []
    for one in overrides:
        key = one.get_key_element()
        if not one.is_sweep_override():
            values[key] = [one.input_line or ""]
            continue
        try:
            values[key] = [f"{key}={value}" for value in _listed(one, most, searches)]
        except Exception as error:  # Hydra raises HydraException, ValueError, TypeError and more
            problems.append(Problem(key, one.get_value_string(), str(error)))
    lists = {_typed(key): key for key, words in values.items() if len(words) > 1}
    together = [key for name, key in lists.items() if name in {*map(_typed, zipped)}]
    counts = [len(values[lists[key]]) if (key := _typed(one)) in lists else 1 for one in zipped]
    if {*counts} & {1} or len({*counts}) > 1:
        told = ", ".join(f"{key} has {count}" for key, count in zip(zipped, counts, strict=True))
        problems.append(Problem("sweep.zip", zipped, f"these lists must be equally long: {told}"))
    if problems:
        raise RequestError(problems)
    axes: list[list[list[str]]] = []
    for key, words in values.items():
        if key not in together:
            axes.append([[word] for word in words])
        elif key == together[0]:
            rows = zip(*(values[one] for one in together), strict=True)
            axes.append([[word for word in row if not word.endswith(_UNSET)] for row in rows])
    count = sum(len(axis) - 1 for axis in axes) + 1 if searches else prod(map(len, axes))
    if count > most:
        sizes = ", ".join(f"{key} {len(one):,}" for key, one in values.items() if len(one) > 1)
        text = f"this sweep has {count:,} runs or more (values: {sizes}); list fewer values, or "
        raise RequestError([Problem("sweep.max_jobs", most, f"{text}raise the limit")])
    chosen: Iterable[Sequence[list[str]]] = product(*axes)
    if searches:
        first = [axis[0] for axis in axes]
        others = ([*first[:n], one, *first[n + 1 :]] for n, a in enumerate(axes) for one in a[1:])
        chosen = [first, *others]
    return values, ([*chain.from_iterable(parts)] for parts in chosen)


def _listed(override: Override, most: int, searches: bool) -> Sequence[str]:
    """Return the values of a list, at most one more than ``most``, or both ends of an interval."""
    listed = override.value()
    if override.is_hydra_override() or override.key_or_group.partition(".")[0] == "sweep":
        raise ValueError("must be one value: all runs of a sweep share it")
    if isinstance(listed, IntervalSweep):
        if not searches:
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


def _placed(
    master: DictConfig,
    fixed: Sequence[str],
    overrides: Sequence[Override],
    jobs: Sequence[Job],
    searches: bool,
) -> Sweep:
    """Return the sweep of ``jobs``: its name follows from them, so that it is found again."""
    lists = [one for one in overrides if one.is_sweep_override()]
    settings = [word for word in fixed if word.startswith(("hydra.sweeper", "hydra/sweeper"))]
    typed = [one.input_line or "" for one in lists]
    # The set of its jobs, in any order.
    identity = digest([sorted(job.hash for job in jobs), sorted([*settings, *typed] * searches)])
    recipes = {job.config.recipe for job in jobs}
    recipe = recipes.pop() if len(recipes) == 1 else "none"
    section = jobs[0].config.sweep
    name = section.name or sweep_name(recipe, (one.key_or_group for one in lists), identity)
    master = copy.deepcopy(master)
    master.sweep.name = name
    folder, problems = destination(master, "sweep")
    if folder is None:
        raise RequestError(problems)
    path = str(folder).replace("${", "\\${").replace("'", "\\'")
    words = [one for one in fixed if key_of(one) not in ("hydra.sweep.dir", "hydra.output_subdir")]
    words += [f"hydra.sweep.dir='{path}'", "hydra.output_subdir=null"]  # its files hold secrets
    if searches and section.maximizes and "direction" in master.hydra.sweeper:
        key = "hydra.sweeper.direction"
        words += [] if key in map(key_of, fixed) else [f"{key}=maximize"]
    listed = []
    for one, word in zip(lists, typed, strict=True):
        key = one.key_or_group
        known = word[0] == "+" or key in master.hydra.runtime.choices or exists(master, key)
        listed.append(word if known else f"++{word}")
    trials = int(_setting(master, "hydra.sweeper.n_trials") or 0) if searches else None
    keys = tuple(dict.fromkeys(one.get_key_element() for one in lists))
    place = where(_setting(master, "hydra.launcher._target_"))
    return Sweep(name, folder, identity, trials, keys, tuple(words), tuple(listed), place)
