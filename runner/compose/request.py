"""From the overrides of a request to its checked jobs, and to running them in Hydra's folders."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from runner.compose import diagnose
from runner.compose import jobs as sweeps
from runner.compose import overrides as words
from runner.compose.composer import (
    Composer,
    Earlier,
    Source,
    destination,
    plain_config,
)
from runner.compose.jobs import Job, Sweep
from runner.compose.masking import recorded_words, resolved_and_recorded
from runner.config.check import examine
from runner.config.folders import outputs
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.schema import RunConfig

T = TypeVar("T")

Waiting: TypeAlias = tuple[int, Sequence[str]]
"""Number and overrides of a run of a sweep."""


@dataclass(frozen=True)
class Request:
    """A request that can be run."""

    composer: Composer
    jobs: tuple[Job, ...]
    sweep: Sweep | None = None
    composed: DictConfig | None = None
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """Overrides of one run as they are recorded, without those of Hydra's own settings."""
        return [] if self.composed is None else recorded_words(self.composed.hydra.overrides.task)

    def run(self, work: Callable[[Path], T], folder: Path | None = None) -> T:
        """Call ``work`` with the folder of the run, in which Hydra has set up logging."""
        composed = self.composed
        assert composed is not None
        with read_write(composed.hydra):
            composed.hydra.mode = RunMode.RUN
            composed.hydra.output_subdir = None  # the files of Hydra's own would hold secrets
            composed.hydra.run.dir = str(folder or self.folder).replace("${", "\\${")
        name, callbacks = self.composer.source.name, Callbacks(composed)
        context = HydraContext(self.composer.loader, callbacks)
        with self.composer.active(), logging_restored():
            callbacks.on_run_start(config=composed, config_name=name)
            ended = run_job(
                lambda _: work(Path(composed.hydra.runtime.output_dir)),
                composed,
                "hydra.run.dir",
                None,
                context,
            )
            callbacks.on_run_end(config=composed, config_name=name, job_return=ended)
            returned: T = ended.return_value
            return returned

    def launch(self, work: Callable[[DictConfig], Any], waiting: Sequence[Waiting]) -> None:
        """Let Hydra's sweeper and launcher call ``work`` for each job of the sweep."""
        assert self.sweep is not None
        import_module("hydra_plugins.clip_runner").RecordSweeper.waiting = waiting
        with self.composer.active(), logging_restored():
            self.composer.hydra.multirun(self.composer.source.name, work, list(self.sweep.words))


def request(
    given: Sequence[str],
    *,
    multirun: bool = False,
    source: Source | None = None,
    writes: bool = True,
    earlier: Earlier | None = None,
) -> Request:
    """Compose and check every job that the overrides ``given`` ask for. Nothing is written."""
    composer = Composer(source or Source(), given)
    sweep = composed = folder = None
    with composer.active():
        overrides, problems = composer.read(given)
        if multirun or _is_sweep(composer, overrides):
            lists = sweeps.read(composer, given, overrides)
            master = lists.master
            jobs, found = sweeps.jobs(composer, lists, _check)
            problems += found
            if jobs and not problems:
                sweep, problems = sweeps.placed(lists, jobs, writes, earlier)
            elif master is not None and writes:
                problems += destination(master, "sweep", overrides)[1]
        else:
            composed = composer.composed(overrides)
            jobs, found = _single(composer, overrides, composed)
            problems += found
            if writes:
                problems += words.only_for_sweeps(overrides)
            if composed is not None:
                folder, found = destination(composed, "run", overrides if writes else None, earlier)
                problems += found
    if problems:
        raise RequestError(_distinct(problems))
    notes = tuple(words.given_twice(overrides))
    return Request(composer, tuple(jobs), sweep, composed, folder, notes)


def _is_sweep(composer: Composer, overrides: Sequence[Override]) -> bool:
    """Return whether the overrides, or a file that they choose, ask for a sweep."""
    config = composer.composed(overrides)
    if config is None:  # another override is wrong
        asking = [each for each in overrides if each.key_or_group in ("recipe", "hydra.mode")]
        # With all choices that exist: the diagnosis composes the same files.
        chosen = [one for one in overrides if diagnose.chooses_option(one, composer.loader)]
        config = composer.composed([*chosen, *asking]) or composer.composed(asking)
    return config is not None and config.hydra.mode == RunMode.MULTIRUN


@contextmanager
def logging_restored() -> Iterator[None]:
    """Close the log files that Hydra opens, and restore the caller's logging."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)


def _single(
    composer: Composer, overrides: Sequence[Override], config: DictConfig | None
) -> tuple[list[Job], list[Problem]]:
    """Check the job of a request that is one run."""
    problems = [
        Problem(override.get_key_element(), override.get_value_string(), words.SWEEP_WITHOUT_FLAG)
        for override in overrides
        if override.is_sweep_override()
    ]
    rest = [override for override in overrides if not override.is_sweep_override()]
    typed, plain, found = _check(composer, rest, config)
    jobs = [] if typed is None else [Job(typed, plain)]
    return jobs, problems + found


def _check(
    composer: Composer,
    overrides: Sequence[Override],
    config: DictConfig | None,
    number: int | None = None,
) -> tuple[RunConfig | None, dict[str, Any], list[Problem]]:
    """Check the job of ``overrides``."""
    found = diagnose.Diagnosis()
    if config is None or diagnose.misuses_group(overrides, composer.loader):
        found = diagnose.examine(overrides, composer)
        config = composer.attempt(found.good)
        if config is None:
            why = diagnose.failure(composer, found.good)  # the fault is in a file
            return None, {}, found.problems or [Problem("configuration", NOTHING, why)]
    plain, recorded, unresolved = _resolved(config, number)
    typed, wrong = examine(plain, found.unsettled)
    known = {problem.key for problem in (*found.problems, *unresolved)}
    problems = found.problems + unresolved
    problems += [problem for problem in wrong if problem.key not in known]
    if error := composer.broken_recipes.get(str(plain.get("recipe"))):
        problems.append(Problem("recipe", plain["recipe"], error))
    return typed, recorded, problems


def _resolved(
    config: DictConfig, number: int | None
) -> tuple[dict[str, Any], dict[str, Any], list[Problem]]:
    """Resolve the job's part of a composition."""
    folder = None if number is not None else destination(config, "run")[0]
    with read_write(config), open_dict(config), read_write(config.hydra):
        if number is not None:  # as the launcher of a sweep does
            config.hydra.job.num, config.hydra.job.id = number, number
        config.hydra.runtime.output_dir = str(folder or outputs())
    HydraConfig.instance().set_config(config)
    job = copy.deepcopy(config)
    with read_write(job), open_dict(job):
        del job["hydra"]
    try:
        return *resolved_and_recorded(job), []
    except OmegaConfBaseException:
        plain = plain_config(job, resolve=False)
        return plain, plain, list(diagnose.unresolved(job, ""))


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    """Drop problems that repeat another one. Problems are no keys: their values may be lists."""
    return list({(each.word, each.message, each.job): each for each in problems}.values())
