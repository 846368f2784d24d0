"""From overrides to a request: one run, or the runs of a sweep, each composed and checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.utils import run_job
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from runner.config.folders import outputs
from runner.config.identity import digest
from runner.config.problem import Problem, RequestError
from runner.request.combinations import combinations
from runner.request.composer import Composer
from runner.request.composition import Composition, refer_to
from runner.request.jobs import Job, job_of
from runner.request.overrides import Override, read_overrides, read_typed
from runner.request.record import write_composition
from runner.request.sweep_settings import (
    Place,
    destination,
    launcher_problems,
    place_of,
    searches,
    setting,
    unresolved_settings,
)
from runner.run_folder import files

_LISTED = "a list of values is a sweep: add -m; one value goes in brackets, [a,b], or in quotes"
_MOST_PROBLEMS = 50  # the problems of further jobs are usually the same


@dataclass(frozen=True)
class Request:
    """A request that can be run: one job in a folder, or the jobs of a sweep."""

    composer: Composer
    jobs: tuple[Job, ...]
    composition: Composition  # of the job, or of what the jobs share
    folder: Path
    sweep: str = ""  # name of the sweep
    place: Place = "here"
    identity: str = ""  # of the jobs of a sweep
    trials: int | None = None  # number of runs that a search chooses
    lists: Mapping[str, str] = field(default_factory=dict)  # overrides that list values, by key

    @property
    def is_search(self) -> bool:
        """Whether a sweeper chooses the runs by the results of earlier ones."""
        return self.trials is not None

    def run(self, train: Callable[[], Any], folder: Path) -> Any:
        """Return what ``train`` returns; Hydra makes ``folder`` and sets up logging before."""

        def write_and_train(config: DictConfig) -> Any:
            write_composition(folder / files.HYDRA, config)
            return train()

        config = self.composition.config
        config.hydra.mode = RunMode.RUN
        config.hydra.output_subdir = None  # the files of Hydra's own would hold secrets
        config.hydra.run.dir = _literal(folder)
        with self.composer.active():
            context = HydraContext(self.composer, Callback())  # type: ignore[arg-type]
            return run_job(write_and_train, config, "hydra.run.dir", None, context).return_value


def request(
    texts: Sequence[str],
    *,
    multirun: bool = False,
    config_dir: Path | None = None,
    after_each: Callable[[], object] = lambda: None,
) -> Request:
    """Return the request of overrides, every job composed and checked. Nothing is written.

    ``after_each`` is called after each job: there may be thousands. A RequestError names everything
    that is wrong.
    """
    composer = Composer(config_dir)
    with composer.active():
        overrides, problems = read_typed(texts)
        composition = composer.compose([override for override in overrides if not override.lists])
        unresolved = list(unresolved_settings(composition.config))
        if unresolved:
            raise RequestError([*problems, *composition.problems, *unresolved])
        if multirun or composition.config.hydra.mode == RunMode.MULTIRUN:
            return _sweep(composer, composition, overrides, problems, after_each)
        return _one_run(composer, composition, overrides, problems, after_each)


def _one_run(
    composer: Composer,
    composition: Composition,
    overrides: Sequence[Override],
    problems: list[Problem],
    after_each: Callable[[], object],
) -> Request:
    """Return the request of one run."""
    lists = _lists(overrides)
    problems += composer.sweeps_in_lists(lists.values())
    folder = outputs()
    with _noted(problems):
        folder = destination(composition.config, "run")
    for override in lists.values():
        problems.append(Problem(override.signed_key, override.value_text, _LISTED))
    jobs: list[Job] = []
    with _noted(problems):
        jobs.append(job_of(composition, folder))
    after_each()
    _refuse(problems)
    return Request(composer, tuple(jobs), composition, folder)


def _sweep(
    composer: Composer,
    shared: Composition,
    overrides: Sequence[Override],
    problems: list[Problem],
    after_each: Callable[[], object],
) -> Request:
    """Return the request of a sweep, whose runs share a composition."""
    params = setting(shared.config, "hydra.sweeper.params") or {}
    if not isinstance(params, dict):
        message = "must be a mapping of keys to their values"
        raise RequestError([*problems, Problem("hydra.sweeper.params", params, message)])
    of_sweeper, unreadable = read_overrides(f"{key}={value}" for key, value in params.items())
    problems += unreadable
    problems += launcher_problems(shared.config)
    # A typed override replaces the sweeper's.
    by_key = {override.signed_key: override for override in [*of_sweeper, *overrides]}
    lists = _lists(by_key.values())
    problems += composer.sweeps_in_lists(lists.values())
    rows = iter([[override.text for key, override in by_key.items() if key not in lists]])
    with _noted(problems):
        destination(shared.config, "sweep")
    if shared.has_sweeper:  # another one could not tell which lists are right
        with _noted(problems):
            rows = combinations(by_key.values(), shared.config)
    jobs: list[Job] = []
    for number, row in enumerate(rows):
        with _noted(problems):
            row_overrides, _ = read_overrides(row)
            job = job_of(composer.compose(row_overrides), outputs(), number)
            varied = tuple(text for text in row if text.partition("=")[0] in lists)
            jobs.append(replace(job, varied=varied))
        after_each()
        if len(problems) > _MOST_PROBLEMS:
            break
    _refuse(problems)
    composer.plan()
    texts = {key: override.text for key, override in lists.items()}
    return _named(Request(composer, tuple(jobs), shared, outputs(), lists=texts))


def _lists(overrides: Iterable[Override]) -> dict[str, Override]:
    """Return the overrides that list values, by their keys."""
    return {override.signed_key: override for override in overrides if override.lists}


def _named(sweep: Request) -> Request:
    """Return a sweep with its name, which follows from its jobs, so that it is found again."""
    config = sweep.composition.config
    refer_to(config)  # after each of its jobs
    section = sweep.jobs[0].config.sweep
    search = searches(config)
    settings: list[str] = []
    if search:
        of_hydra: Any = OmegaConf.to_container(config.hydra.overrides.hydra)
        settings = sorted([*of_hydra, *sweep.lists.values()])
    identity = digest([sorted(job.hash for job in sweep.jobs), settings])
    name = section.name or f"{_readable_name(sweep)}-{identity[:8]}"
    config.sweep.name = name
    folder = destination(config, "sweep")
    config.hydra.sweep.dir = _literal(folder)
    config.hydra.output_subdir = None  # the files of Hydra's own would hold secrets
    trials = None
    if search:
        trials = int(setting(config, "hydra.sweeper.n_trials") or 0)
        if section.maximizes:
            config.hydra.sweeper.direction = "maximize"
    return replace(
        sweep,
        folder=folder,
        sweep=name,
        place=place_of(config),
        identity=identity,
        trials=trials,
    )


def _readable_name(sweep: Request) -> str:
    """Return the recipe of a sweep and the keys that vary, as part of a file name."""
    recipes = {job.config.recipe for job in sweep.jobs}
    parts = [*recipes] if len(recipes) == 1 and "none" not in recipes else []
    parts += [key.lstrip("+") for key in sweep.lists]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))[:48].strip("-._") or "sweep"


def _literal(folder: Path) -> str:
    """Return a path as OmegaConf takes it, in which nothing is a reference."""
    return str(folder).replace("${", "\\${")


@contextmanager
def _noted(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a RequestError to ``problems``: the other overrides are checked too."""
    try:
        yield
    except RequestError as error:
        problems += error.problems


def _refuse(problems: Sequence[Problem]) -> None:
    """Raise a RequestError of the problems, if there are any; each is named once."""
    if problems:
        raise RequestError({(item.word, item.message): item for item in problems}.values())
