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

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log, run_job
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from runner.compose.composer import Composed, Composer, Source
from runner.compose.jobs import (
    SWEEP_WITHOUT_FLAG,
    Earlier,
    Job,
    Sweep,
    destination,
    only_for_sweeps,
    sweep,
)
from runner.compose.record import recorded_words, resolved_and_recorded
from runner.compose.values import unresolved
from runner.config.check import examine
from runner.config.folders import outputs
from runner.config.problem import Problem, RequestError

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
        with self.composer.active(), logging_restored():
            ended = run_job(
                lambda _: work(Path(composed.hydra.runtime.output_dir)),
                composed,
                "hydra.run.dir",
                None,
                HydraContext(self.composer.loader, Callback()),  # type: ignore[arg-type]
            )
            returned: T = ended.return_value
            return returned

    def launch(self, work: Callable[[DictConfig], Any], waiting: Sequence[Waiting]) -> None:
        """Let Hydra's sweeper and launcher call ``work`` for each job of the sweep."""
        assert self.sweep is not None
        import_module("hydra_plugins.clip_runner").RecordSweeper.waiting = waiting
        with self.composer.active(), logging_restored():
            overrides, _ = self.composer.read(self.sweep.words)
            words = {one.input_line or "": one.is_sweep_override() for one in overrides}
            fixed = [word for word, lists in words.items() if not lists]
            config = compose(self.composer.source.name, fixed, return_hydra_config=True)
            HydraConfig.instance().set_config(config)
            configure_log(config.hydra.hydra_logging, config.hydra.verbose)
            sweeper = Plugins.instance().instantiate_sweeper(
                hydra_context=HydraContext(self.composer.loader, Callback()),  # type: ignore[arg-type]
                task_function=work,
                config=config,
            )
            listed = [word for word, lists in words.items() if lists]
            typed: Any = OmegaConf.to_container(config.hydra.overrides.task)  # references as typed
            sweeper.sweep([*typed, *listed])


def request(
    given: Sequence[str],
    *,
    multirun: bool = False,
    source: Source | None = None,
    writes: bool = True,
    earlier: Earlier | None = None,
) -> Request:
    """Compose and check every job that the overrides ``given`` ask for. Nothing is written."""
    composer = Composer(source or Source())
    placed = composed = folder = None
    with composer.active():
        overrides, problems = composer.read(given)
        fixed = [one for one in overrides if not one.is_sweep_override()]
        made = composer.compose(fixed)
        if multirun or (made.config is not None and made.config.hydra.mode == RunMode.MULTIRUN):
            jobs, placed, found = sweep(composer, overrides, _job, earlier, writes)
        else:
            job, found = _check(made, None)
            jobs = [] if job is None else [job]
            found += (
                Problem(one.get_key_element(), one.get_value_string(), SWEEP_WITHOUT_FLAG)
                for one in overrides
                if one.is_sweep_override()
            )
            found += only_for_sweeps(overrides) if writes else ()
            composed = made.config
            if composed is not None:
                typed = overrides if writes else None
                folder, wrong = destination(composed, "run", typed, earlier)
                found += wrong
    if problems := [*problems, *found]:
        distinct = {(one.word, one.message, one.job): one for one in problems}
        raise RequestError(distinct.values())
    return Request(composer, tuple(jobs), placed, composed, folder, tuple(_given_twice(overrides)))


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


def _job(
    composer: Composer, overrides: Sequence[Override], number: int | None
) -> tuple[Job | None, list[Problem]]:
    return _check(composer.compose(overrides), number)


def _check(made: Composed, number: int | None) -> tuple[Job | None, list[Problem]]:
    """Return the job of a composition, and what is wrong with it."""
    config = made.config
    if config is None:
        return None, made.problems
    folder = None if number is not None else destination(config, "run", None, None)[0]
    with read_write(config), open_dict(config), read_write(config.hydra):
        if number is not None:  # as the launcher of a sweep does
            config.hydra.job.num, config.hydra.job.id = number, number
        config.hydra.runtime.output_dir = str(folder or outputs())
    HydraConfig.instance().set_config(config)
    job = copy.deepcopy(config)
    with read_write(job), open_dict(job):
        del job["hydra"]
    try:
        resolved, plain = resolved_and_recorded(job)
        broken: list[Problem] = []
    except OmegaConfBaseException:
        written: Any = OmegaConf.to_container(job)
        resolved = plain = written
        broken = list(unresolved(job))
    typed, found = examine(resolved, made.unsettled)
    known = {one.key for one in (*made.problems, *broken)}
    problems = [*made.problems, *broken, *(one for one in found if one.key not in known)]
    if typed is None or problems:
        return None, problems
    return Job(typed, plain, tuple(made.words)), []


def _given_twice(overrides: Sequence[Override]) -> Iterator[str]:
    """Yield a sentence for each key or group that is given several values: only one holds."""
    values: dict[str, list[str]] = {}
    for one in overrides:
        values.setdefault(one.key_or_group, []).append(one.input_line or "")
    for key, given in values.items():
        if len(set(given)) > 1:
            yield f"{key} is given {len(given)} times: {given[-1]} holds, since it comes last"
