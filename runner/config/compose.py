"""From the words of a request to the typed configuration of each job; the disk is left alone."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from string import Template
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.config import diagnose, recipes, resolvers, words
from runner.config.check import examine
from runner.config.destination import folder_problems
from runner.config.folders import find
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.resolve import resolved
from runner.config.schema import RunConfig

VERSION_BASE = "1.3"
CONFIG_NAME = "config"
JOB_NAME = "runner"


@dataclass(frozen=True)
class Job:
    """One training job of a request.

    Attributes:
        label: the words that set it apart from the other jobs; empty for a single one.
        config: its configuration.
        plain: the same as plain containers, to hand to other processes.
    """

    label: str
    config: RunConfig
    plain: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A request that can be run.

    Attributes:
        words: what to hand to Hydra.
        multirun: whether it is a sweep.
        jobs: its jobs, in Hydra's order.
    """

    words: tuple[str, ...]
    multirun: bool
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Source:
    """Where the configuration is read: ``--config-path``, ``--config-name``, ``--config-dir``."""

    path: Path | None = None
    name: str = CONFIG_NAME
    extra: Path | None = None


def register() -> dict[str, str]:
    """Teach Hydra this project's resolvers and recipes; why a recipe cannot be read, by name."""
    resolvers.register()
    return recipes.register()


def request(
    given: Sequence[str],
    *,
    multirun: bool = False,
    source: Source | None = None,
    writes: bool = True,
    claims: bool = True,
) -> Request:
    """Compose and check every job that the words ``given`` ask for.

    Args:
        given: the words as typed.
        multirun: whether a sweep is asked for (``-m``).
        source: where the configuration is read; the project's own by default.
        writes: whether the request will write a folder, which is then tried.
        claims: whether that folder must hold no earlier record; not so for a rank that joins, since
            the first rank may have begun the record.

    Raises:
        RequestError: anything is wrong; it names all of it.
    """
    source = source or Source()
    broken = register()
    with _hydra(source) as loader:
        composer = _Composer(source, loader, broken)
        overrides, problems = words.read(given, loader)
        shared = [override for override in overrides if not override.is_sweep_override()]
        master = composer.attempt([words.plain_word(override) for override in shared])
        multirun = multirun or (master is not None and master.hydra.mode == RunMode.MULTIRUN)
        if multirun:
            jobs, found = _sweep(composer, overrides, master)
        else:
            jobs, found = _single(composer, overrides, master)
        problems += found
        final = tuple(given)
        if multirun and master is None and not problems:
            final = _for_every_job(composer, overrides)
            lists = {override.input_line for override in overrides if override.is_sweep_override()}
            master = composer.attempt([word for word in final if word not in lists])
        if master is not None and writes:
            kind = "sweep" if multirun else "run"
            problems += folder_problems(master, kind, overrides, claims)
    if problems:
        raise RequestError(_distinct(problems))
    return Request(final, multirun, tuple(jobs))


def help_text(given: Sequence[str], source: Source | None = None) -> str:
    """The text of ``--help``, with the values that the words ``given`` give; they are checked.

    Hydra would print the same, but lists every group of its own first, which takes longer than all
    the rest.
    """
    source = source or Source()
    register()
    with _hydra(source):
        template: str = compose(
            source.name, list(given), return_hydra_config=True
        ).hydra.help.template
    return Template(template).safe_substitute()


@contextmanager
def _hydra(source: Source) -> Iterator[ConfigLoader]:
    GlobalHydra.instance().clear()
    folder = source.path or find("conf")
    with initialize_config_dir(str(folder.absolute()), JOB_NAME, version_base=VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        if source.extra is not None:
            _add_source(loader, source.extra)
        try:
            yield loader
        finally:
            HydraConfig.instance().cfg = None


def _add_source(loader: Any, folder: Path) -> None:
    """Read ``folder`` too, with the precedence that Hydra gives to ``--config-dir``."""
    search_path = loader.get_search_path()
    search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    loader.repository.initialize_sources(search_path)


class _Composer:
    """Composes words and checks what they give."""

    def __init__(self, source: Source, loader: ConfigLoader, broken: dict[str, str]) -> None:
        self.source = source
        self.loader = loader
        self.broken = broken
        # A diagnosis asks for the same words again; a sweep of many jobs must not keep them all.
        self._attempted = lru_cache(maxsize=8)(self._attempt)

    def __call__(self, given: Sequence[str]) -> DictConfig:
        return compose(self.source.name, list(given), return_hydra_config=True)

    def attempt(self, given: Sequence[str]) -> DictConfig | None:
        """What ``given`` gives, or None where it does not compose."""
        return self._attempted(tuple(given))

    def _attempt(self, given: tuple[str, ...]) -> DictConfig | None:
        try:
            return self(given)
        except Exception:  # Hydra and OmegaConf raise ValueError, AssertionError and more for words
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
            return None

    def check(
        self, overrides: Sequence[Override], config: DictConfig | None, number: int | None = None
    ) -> tuple[RunConfig | None, dict[str, Any], list[Problem]]:
        """The job of ``overrides``, and all that is wrong with it."""
        found = diagnose.Findings()
        if config is None or diagnose.misuses_group(overrides, self.loader):
            found = diagnose.examine(overrides, self.attempt, self, self.loader)
            config = self.attempt(found.good)
            if config is None:
                return None, {}, found.problems or [self._failure(found.good)]
        plain, unresolved = resolved(config, number)
        typed, wrong = examine(plain, found.unsettled)
        known = {problem.key for problem in (*found.problems, *unresolved)}
        problems = found.problems + unresolved
        problems += [problem for problem in wrong if problem.key not in known]
        if error := self.broken.get(str(plain.get("recipe"))):
            problems.append(Problem("recipe", plain["recipe"], error))
        return typed, plain, problems

    def refuse(self, word: str) -> Problem | None:
        """The problem of a word that chooses an option which does not exist."""
        [override], _ = words.read([word], self.loader)
        return diagnose.wrong_choice(override, self.loader)

    def _failure(self, given: Sequence[str]) -> Problem:
        """Why ``given`` does not compose, where no word is to blame but a file is."""
        try:
            self(given)
        except Exception as error:  # as above
            return Problem("configuration", NOTHING, diagnose.reason(error))
        raise AssertionError("composed at the second attempt")


def _single(
    composer: _Composer, overrides: Sequence[Override], config: DictConfig | None
) -> tuple[list[Job], list[Problem]]:
    lists = [override for override in overrides if override.is_sweep_override()]
    problems = [
        Problem(override.get_key_element(), override.get_value_string(), words.SWEEP_WITHOUT_FLAG)
        for override in lists
    ]
    rest = [override for override in overrides if not override.is_sweep_override()]
    typed, plain, found = composer.check(rest, config)
    jobs = [Job("", typed, plain)] if typed is not None else []
    return jobs, problems + found


def _sweep(
    composer: _Composer, overrides: Sequence[Override], master: DictConfig | None
) -> tuple[list[Job], list[Problem]]:
    params = OmegaConf.select(master, "hydra.sweeper.params") if master is not None else None
    listed, problems = words.read(
        [f"{key}={value}" for key, value in (params or {}).items()], composer.loader
    )
    wanted, found = words.jobs([*listed, *overrides], composer.loader, composer.refuse)
    problems += found
    jobs = []
    by_job: list[list[Problem]] = []
    for number, job in enumerate(wanted):
        parsed, _ = words.read(job.words, composer.loader)
        typed, plain, found = composer.check(parsed, composer.attempt(job.words), number)
        by_job.append([replace(problem, job=job.label) for problem in found])
        if typed is not None:
            jobs.append(Job(job.label, typed, plain))
    return jobs, problems + _merged(by_job)


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    # Values may be lists, so problems are no keys; what they say is.
    by_text = {(problem.word, problem.message, problem.job): problem for problem in problems}
    return list(by_text.values())


def _merged(by_job: Sequence[Sequence[Problem]]) -> list[Problem]:
    """One problem for those that every job has, the others with their first job."""
    alike: dict[tuple[str, str], list[Problem]] = {}
    for problem in (problem for found in by_job for problem in found):
        alike.setdefault((problem.word, problem.message), []).append(problem)
    return [
        replace(found[0], job="") if len(found) == len(by_job) else found[0]
        for found in alike.values()
    ]


def _for_every_job(composer: _Composer, overrides: Sequence[Override]) -> tuple[str, ...]:
    """The words of a sweep in a form that Hydra can also compose without the lists in it.

    Hydra composes a sweep once without them first, and there ``model.layers=2`` has no place while
    the model that has layers is one of a list. Every job was checked, so the key may be forced.
    """
    settled = [
        words.plain_word(override)
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
