"""From the overrides of a request to its checked jobs, and to running them in Hydra's folders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log, run_job
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from runner.compose.composer import Composed, Composer, Source
from runner.compose.jobs import Earlier, Job, Sweep, destination, only_for_sweeps, sweep
from runner.compose.record import as_yaml, checked, recorded_words, unresolved_composition
from runner.config.folders import outputs
from runner.config.problem import RequestError

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
                self._context(),
            )
            returned: T = ended.return_value
            return returned

    def launch(
        self, work: Callable[[DictConfig], Any], waiting: Sequence[Waiting], file: Path
    ) -> None:
        """Let Hydra's launcher, or the sweeper of a search, call ``work`` for each job.

        What Hydra composed the sweep from is written to ``file``.
        """
        assert self.sweep is not None
        with self.composer.active(), logging_restored():
            config = compose(
                self.composer.source.name, [*self.sweep.words], return_hydra_config=True
            )
            HydraConfig.instance().set_config(config)
            configure_log(config.hydra.hydra_logging, config.hydra.verbose)
            file.write_text(as_yaml(unresolved_composition(config)), encoding="utf-8")
            given: Any = {"hydra_context": self._context(), "task_function": work, "config": config}
            if self.sweep.trials is not None:
                typed: Any = OmegaConf.to_container(config.hydra.overrides.task)  # references too
                Plugins.instance().instantiate_sweeper(**given).sweep([*typed, *self.sweep.lists])
                return
            launcher = Plugins.instance().instantiate_launcher(**given)
            # Hydra numbers the runs of one launch without a gap.
            for _, numbered in groupby(enumerate(waiting), lambda one: one[1][0] - one[0]):
                batch = [one for _, one in numbered]
                for ended in launcher.launch([words for _, words in batch], batch[0][0]):
                    _ = ended.return_value  # raises what a job raised

    def _context(self) -> HydraContext:
        return HydraContext(self.composer.loader, Callback())  # type: ignore[arg-type]


def request(
    given: Sequence[str],
    *,
    multirun: bool = False,
    source: Source | None = None,
    writes: bool = True,
    earlier: Earlier | None = None,
) -> Request:
    """Compose and check every job that the overrides ``given`` ask for. Nothing is written."""
    composer = Composer(source)
    earlier = earlier if writes else None
    placed = folder = None
    jobs: Sequence[Job] = ()
    with composer.active():
        overrides, problems = composer.read(given)
        made = composer.compose([one for one in overrides if not one.is_sweep_override()])
        config = made.config
        if multirun or config.hydra.mode == RunMode.MULTIRUN:
            jobs, placed, found = sweep(composer, made, overrides, _job, earlier)
        else:
            folder, found = destination(config, "run", earlier)
            found += only_for_sweeps(overrides)
            try:
                jobs = [_job(made, None)]
            except RequestError as error:
                problems += error.problems
    if problems := [*problems, *found]:
        distinct = {(one.word, one.message): one for one in problems}
        raise RequestError(distinct.values())
    return Request(composer, tuple(jobs), placed, None if placed else config, folder)


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


def _job(made: Composed, number: int | None) -> Job:
    """Return the job of a composition, checked as it will be in its place."""
    config = made.config
    folder = None if number is not None else destination(config, "run")[0]
    with read_write(config), open_dict(config), read_write(config.hydra):
        if number is not None:  # as the launcher of a sweep does
            config.hydra.job.num, config.hydra.job.id = number, number
        config.hydra.runtime.output_dir = str(folder or outputs())
    HydraConfig.instance().set_config(config)
    return checked(made)
