"""From the overrides of a sweep to its jobs, its name and its folder."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from runner.compose import diagnose, launchers
from runner.compose import overrides as words
from runner.compose.composer import Composer, Earlier, destination, plain_word
from runner.config.identity import config_hash, request_hash, sweep_name
from runner.config.problem import Problem
from runner.config.schema import RunConfig
from runner.config.secrets import masked_words
from runner.config.values import CONFIG, Count, allowed

Check: TypeAlias = Callable[
    [Composer, Sequence[Override], DictConfig | None, int | None],
    tuple[RunConfig | None, dict[str, Any], list[Problem]],
]
"""Checks one job, given its overrides, their composition and its number in the sweep."""

SWEEPER = "clip_runner"
"""The option of ``hydra/sweeper`` that runs the jobs of a sweep's record."""

MOST_WRONG = 10
"""Wrong jobs after which no further one is checked: most of their problems are the same."""

_BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


# Keys of Hydra's sweepers: optuna's trials and its jobs at a time, the basic one's jobs at a time.
_COUNTS: dict[str, Any] = {"n_trials": Count, "n_jobs": Count, "max_batch_size": Count | None}


@dataclass(frozen=True)
class Job:
    """One training job of a request."""

    config: RunConfig
    plain: dict[str, Any]
    words: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The overrides that set it apart, as one line."""
        return " ".join(masked_words(self.apart))

    @cached_property
    def hash(self) -> str:
        """Hash of the configuration: 16 hexadecimal digits."""
        return config_hash(self.plain)


@dataclass(frozen=True)
class Sweep:
    """A sweep before it starts."""

    name: str
    folder: Path
    identity: str
    trials: int | None
    keys: tuple[str, ...]
    words: tuple[str, ...]
    where: launchers.Where = "here"


@dataclass(frozen=True)
class Lists:
    """The overrides of a sweep, and their composition without the lists of values."""

    overrides: Sequence[Override]
    final: tuple[str, ...]
    master: DictConfig | None

    @property
    def enumerated(self) -> bool:
        """Whether the jobs are all combinations of the lists, not chosen by a sweeper."""
        return bool(self._setting("hydra.sweeper._target_", _BASIC) == _BASIC)

    @property
    def params(self) -> list[str]:
        """Lists of values that files give, as overrides."""
        given = self._setting("hydra.sweeper.params") or {}
        return [f"{key}={value}" for key, value in given.items()]

    @property
    def together(self) -> list[str]:
        """The keys whose lists advance together."""
        keys = self._setting("sweep.zip")
        return [str(key) for key in keys] if OmegaConf.is_list(keys) else []

    @property
    def most(self) -> int | None:
        """``sweep.max_jobs``; None if it is not known, or wrong."""
        most = self._setting("sweep.max_jobs")
        return most if type(most) is int and most > 0 else None

    def _setting(self, key: str, default: Any = None) -> Any:
        try:
            return OmegaConf.select(self.master or OmegaConf.create(), key, default=default)
        except OmegaConfBaseException:  # it refers to nothing, which the check of a job reports
            return default


def read(composer: Composer, given: Sequence[str], overrides: Sequence[Override]) -> Lists:
    """Compose the overrides of a sweep without their lists of values."""
    master = composer.composed(overrides)
    if master is not None:
        return Lists(overrides, tuple(given), master)
    final = _for_every_job(composer, overrides)
    listed = {override.input_line for override in overrides if override.is_sweep_override()}
    master = composer.attempt([word for word in final if word not in listed])
    return Lists(overrides, final, master)


def jobs(composer: Composer, lists: Lists, check: Check) -> tuple[list[Job], list[Problem]]:
    """Return the jobs of a sweep, and everything that is wrong with them."""
    listed, problems = composer.read(lists.params)
    wanted, found = words.jobs(
        [*listed, *lists.overrides],
        composer.loader,
        partial(diagnose.refuse, composer),
        together=lists.together,
        enumerated=lists.enumerated,
        most=lists.most or _most(composer),
    )
    problems += found
    problems += [*_sweeper_problems(lists.master), *launchers.problems(lists.master)]
    made, wrong = [], 0
    by_job: list[list[Problem]] = []
    for number, (given, apart) in enumerate(wanted):
        parsed, _ = composer.read(given)
        typed, plain, found = check(composer, parsed, composer.attempt(given), number)
        by_job.append([replace(problem, job=" ".join(apart)) for problem in found])
        wrong += bool(found)
        if wrong == MOST_WRONG:
            break
        if typed is not None:
            made.append(Job(typed, plain, tuple(given), tuple(apart)))
    return made, problems + _merged(by_job)


def _most(composer: Composer) -> int:
    """Return ``sweep.max_jobs`` as it is without any overrides; 1 if a file is at fault."""
    return Lists((), (), composer.attempt([])).most or 1


def _sweeper_problems(master: DictConfig | None) -> Iterator[Problem]:
    """Yield a problem for each count of a sweeper that is out of range."""
    settings: dict[str, Any] = {} if master is None else dict(master.hydra.sweeper)
    for key in (key for key in _COUNTS if key in settings):
        try:
            TypeAdapter(_COUNTS[key], config=CONFIG).validate_python(settings[key])
        except ValidationError:
            text = allowed(_COUNTS[key]).text
            yield Problem(f"hydra.sweeper.{key}", settings[key], f"must be {text}")


def placed(
    lists: Lists, made: Sequence[Job], writes: bool, earlier: Earlier | None
) -> tuple[Sweep | None, list[Problem]]:
    """Return the sweep of the jobs ``made``, and why its folder cannot be written."""
    if lists.master is None:
        return None, []
    typed = [override for override in lists.overrides if override.is_sweep_override()]
    settings = [
        override.input_line or ""
        for override in lists.overrides
        if override.key_or_group.startswith(("hydra.sweeper", "hydra/sweeper"))
    ]
    search = [] if lists.enumerated else [*settings, *(one.input_line or "" for one in typed)]
    identity = request_hash((job.hash for job in made), search)
    recipes = {job.config.recipe for job in made}
    recipe = recipes.pop() if len(recipes) == 1 else "none"
    name = made[0].config.sweep.name or sweep_name(
        recipe, (override.key_or_group for override in typed), identity
    )
    master = copy.deepcopy(lists.master)
    master.sweep.name = name
    folder, problems = destination(master, "sweep", lists.overrides if writes else None)
    if folder is None or problems:
        return None, problems
    added = [job.hash for job in made] if lists.enumerated else []
    if writes and earlier is not None and (message := earlier(folder, identity, added)):
        return None, [Problem("sweep.name", name, message)]
    if problem := _subdir_problem(master):
        return None, [problem]
    if writes and (problem := launchers.lacking(master)):
        return None, [problem]
    trials = None if lists.enumerated else int(master.hydra.sweeper.get("n_trials") or 0)
    final = _for_hydra(lists, folder, made[0].config.sweep.maximizes)
    keys = [*(word.partition("=")[0] for word in lists.params)]
    keys += [override.get_key_element() for override in typed]
    where = launchers.where(master.hydra.launcher.get("_target_"))
    return Sweep(name, folder, identity, trials, tuple(dict.fromkeys(keys)), final, where), []


def _subdir_problem(master: DictConfig) -> Problem | None:
    """Return a problem if the folders of runs would not lie directly in that of the sweep."""
    settings: Any = OmegaConf.to_container(master.hydra.sweep, resolve=False)
    subdir = str(settings["subdir"])
    if "/" not in re.sub(r"\$\{[^{}]*\}", "", subdir):
        return None
    message = "must name one folder, without slashes: the runs of a sweep lie in its folder"
    return Problem("hydra.sweep.subdir", subdir, message)


def _for_hydra(lists: Lists, folder: Path, maximizes: bool) -> tuple[str, ...]:
    """Return the overrides of a sweep with its folder and sweeper, for Hydra."""
    path = str(folder).replace("${", "\\${").replace("'", "\\'")
    ours = {
        "hydra.sweep.dir": f"hydra.sweep.dir='{path}'",
        "hydra.output_subdir": "hydra.output_subdir=null",  # Hydra's own files would hold secrets
    }
    if lists.enumerated:
        ours["hydra/sweeper"] = f"hydra/sweeper={SWEEPER}"
    typed = {override.key_or_group for override in lists.overrides}
    direction = "hydra.sweeper.direction"
    known = lists.master is not None and "direction" in lists.master.hydra.sweeper
    if maximizes and known and direction not in typed:
        ours[direction] = f"{direction}=maximize"
    kept = [
        word
        for word, override in zip(lists.final, lists.overrides, strict=True)
        if override.key_or_group not in ours
    ]
    return (*kept, *ours.values())


def _merged(by_job: Sequence[Sequence[Problem]]) -> list[Problem]:
    """Report a problem of every job once, and any other problem with its first job."""
    alike: dict[tuple[str, str], list[Problem]] = {}
    for problem in chain.from_iterable(by_job):
        alike.setdefault((problem.word, problem.message), []).append(problem)
    return [
        replace(found[0], job="") if len(found) == len(by_job) else found[0]
        for found in alike.values()
    ]


def _for_every_job(composer: Composer, overrides: Sequence[Override]) -> tuple[str, ...]:
    """Return the overrides of a sweep in a form that Hydra can compose without the lists too."""
    settled = [
        plain_word(override)
        for override in overrides
        if not override.is_sweep_override()
        and composer.loader.get_group_options(override.key_or_group)
    ]
    final = []
    for override in overrides:
        word = override.input_line or ""
        sets = not (override.is_add() or override.is_force_add() or override.is_delete())
        homeless = not override.is_sweep_override() and composer.attempt([*settled, word]) is None
        final.append(f"++{word}" if sets and homeless else word)
    return tuple(final)
