"""From the words of a request to the typed configuration of each job; the disk is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

from hydra import compose
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig

from runner.compose import hydra_plugins as plugins
from runner.compose import jobs as sweeps
from runner.compose import overrides as words
from runner.compose import recipes, resolvers
from runner.compose.composer import VERSION_BASE, Composer, Source, session
from runner.compose.destination import Earlier, folder_problems
from runner.compose.jobs import Job, Sweep
from runner.config.problem import Problem, RequestError

__all__ = [
    "VERSION_BASE",
    "Job",
    "Request",
    "Source",
    "help_text",
    "register",
    "request",
]


@dataclass(frozen=True)
class Request:
    """A request that can be run.

    Attributes:
        words: what to hand to Hydra.
        multirun: whether it is a sweep.
        jobs: its jobs, in Hydra's order; of a sweep that chooses them as it goes, jobs that stand
            for those.
        sweep: what is known of the sweep; None for one run.
        notes: sentences about what is allowed, but may not be meant.
    """

    words: tuple[str, ...]
    multirun: bool
    jobs: tuple[Job, ...]
    sweep: Sweep | None = None
    notes: tuple[str, ...] = ()


def register() -> dict[str, str]:
    """Teach Hydra this project's resolvers, sweeper and recipes; why a recipe cannot be read."""
    resolvers.register()
    plugins.register()
    return recipes.register()


def request(
    given: Sequence[str],
    *,
    multirun: bool = False,
    source: Source | None = None,
    writes: bool = True,
    earlier: Earlier | None = None,
) -> Request:
    """Compose and check every job that the words ``given`` ask for.

    Args:
        given: the words as typed.
        multirun: whether a sweep is asked for (``-m``).
        source: where the configuration is read; the project's own by default.
        writes: whether the request will write a folder, which is then tried; where that is one
            run's, overrides that only a sweep uses are refused.
        earlier: returns why that folder must not be written again, such as
            :func:`runner.run_folder.earlier.earlier_record`. None for a folder that may be.

    Raises:
        RequestError: anything is wrong; it names all of it.
    """
    source = source or Source()
    broken = register()
    with session(source) as loader:
        composer = Composer(source, loader, broken)
        overrides, problems = words.read(given, loader)
        lists = sweeps.read(composer, given, overrides)
        sweep = None
        multirun = multirun or (
            lists.master is not None and lists.master.hydra.mode == RunMode.MULTIRUN
        )
        if multirun:
            jobs, found = sweeps.jobs(composer, lists)
            problems += found
            if jobs and not problems:
                sweep, problems = sweeps.placed(lists, jobs, writes, earlier)
            elif lists.master is not None and writes:
                problems += folder_problems(lists.master, "sweep", overrides)
        else:
            master = composer.attempt(lists.shared)
            jobs, found = _single(composer, overrides, master)
            problems += found
            if writes:
                problems += words.only_for_sweeps(overrides)
            if master is not None and writes:
                problems += folder_problems(master, "run", overrides, earlier)
    if problems:
        raise RequestError(_distinct(problems))
    final, notes = sweep.words if sweep else tuple(given), tuple(words.given_twice(overrides))
    return Request(final, multirun, tuple(jobs), sweep, notes)


def help_text(given: Sequence[str], source: Source | None = None) -> str:
    """The text of ``--help``, with the values that the words ``given`` give; they are checked.

    Hydra would print the same, but lists every group of its own first, which takes longer than all
    the rest.
    """
    source = source or Source()
    register()
    with session(source):
        template: str = compose(
            source.name, list(given), return_hydra_config=True
        ).hydra.help.template
    return Template(template).safe_substitute()


def _single(
    composer: Composer, overrides: Sequence[Override], config: DictConfig | None
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


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    # Values may be lists, so problems are no keys; what they say is.
    by_text = {(problem.word, problem.message, problem.job): problem for problem in problems}
    return list(by_text.values())
