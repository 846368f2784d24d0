"""From the overrides of a request to its checked jobs, and to running them in Hydra's folders."""

from __future__ import annotations

import argparse
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, TypeVar

from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import Override
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, read_write

from runner.compose import diagnose
from runner.compose import jobs as sweeps
from runner.compose import overrides as words
from runner.compose.composer import Composer, Earlier, Source, destination
from runner.compose.jobs import Job, Sweep
from runner.config.problem import Problem, RequestError

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A request that can be run.

    Attributes:
        composer: Hydra, with the files that the request was composed from.
        jobs: jobs of the request, in Hydra's order; of a sweep that chooses its jobs as it goes,
            representative jobs.
        sweep: the sweep; None for one run.
        composed: the composition of one run, Hydra's part included; None for a sweep.
        folder: folder of one run; None for a sweep.
        notes: sentences about overrides that are allowed, but may not be meant.
    """

    composer: Composer
    jobs: tuple[Job, ...]
    sweep: Sweep | None = None
    composed: DictConfig | None = None
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """Overrides of one run, without those of Hydra's own settings."""
        return [] if self.composed is None else list(self.composed.hydra.overrides.task)

    def run(self, work: Callable[[Path], T]) -> T:
        """Call ``work`` with the folder of the run, in which Hydra has set up logging.

        Returns:
            What ``work`` returned.
        """
        composed = self.composed
        assert composed is not None
        with read_write(composed.hydra):
            composed.hydra.mode = RunMode.RUN
        name, callbacks = self.composer.source.name, Callbacks(composed)
        context = HydraContext(self.composer.loader, callbacks)
        with self.composer.active(), _logging_restored():
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

    def launch(self, work: Callable[[DictConfig], Any]) -> None:
        """Let Hydra's sweeper and launcher call ``work`` for each job of the sweep.

        Args:
            work: function of a module, which a launcher may import in other processes.
        """
        assert self.sweep is not None
        with self.composer.active(), _logging_restored():
            self.composer.hydra.multirun(self.composer.source.name, work, list(self.sweep.words))


def request(
    given: Sequence[str],
    *,
    multirun: bool = False,
    source: Source | None = None,
    writes: bool = True,
    earlier: Earlier | None = None,
) -> Request:
    """Compose and check every job that the overrides ``given`` ask for. Nothing is written.

    Args:
        given: overrides, as typed.
        multirun: whether a sweep is asked for (``-m``).
        source: where the configuration is read; the project's own files by default.
        writes: whether the request will write a folder, so that this is tried. Overrides that only
            a sweep uses are then refused for one run.
        earlier: returns why that folder must not be written again, such as
            :func:`runner.run_folder.earlier.earlier_record`. None for a folder that may be.

    Raises:
        RequestError: anything is wrong; it names everything that is.
    """
    composer = Composer(source or Source(), given)
    sweep = composed = folder = None
    with composer.active():
        overrides, problems = words.read(given, composer.loader)
        if multirun or _is_sweep(composer, overrides):
            lists = sweeps.read(composer, given, overrides)
            master = lists.master
            jobs, found = sweeps.jobs(composer, lists)
            problems += found
            if jobs and not problems:
                sweep, problems = sweeps.placed(lists, jobs, writes, earlier)
            elif master is not None and writes:
                problems += destination(master, "sweep", overrides)[1]
        else:
            composed = composer.attempt(words.shared(overrides))
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
    config = composer.attempt(words.shared(overrides))
    if config is None:  # another override is wrong
        chosen = [each for each in overrides if each.key_or_group in ("recipe", "hydra.mode")]
        config = composer.attempt(words.shared(chosen))
    return config is not None and config.hydra.mode == RunMode.MULTIRUN


def help_text(given: Sequence[str], source: Source | None = None) -> str:
    """Return the text of ``--help``, with the values that the overrides ``given`` give.

    Hydra would print the same, but lists every group of its own first, which takes longer than
    everything else.

    Raises:
        RequestError: the overrides are wrong.
    """
    if given:
        wanted = request(given, source=source, writes=False)
        composer, composed = wanted.composer, wanted.composed
    else:
        composer, composed = Composer(source or Source(), given), None
    with composer.active():
        composed = composed or composer.compose(given)
        return Template(composed.hydra.help.template).safe_substitute()


def answer(args: argparse.Namespace, composer: Composer) -> int:
    """Print Hydra's answer to ``--cfg``, ``--info``, ``--hydra-help`` or ``--shell-completion``.

    Hydra prints into memory, and this process to the terminal: Hydra would report a reader that
    leaves early, as in ``--info | head``, as a failure of its own.

    Returns:
        The exit code: 0, or what Hydra exits with.
    """
    printed, code = io.StringIO(), 0
    hydra, name, overrides = composer.hydra, composer.source.name, list(args.overrides)
    with composer.active(), _logging_restored(), redirect_stdout(printed):
        try:
            if args.hydra_help:
                hydra.hydra_help(name, get_args_parser(), args)
            elif args.shell_completion:
                hydra.shell_completion(name, overrides)
            elif args.cfg is not None:
                hydra.show_cfg(name, overrides, args.cfg, args.package, args.resolve)
            else:
                hydra.show_info(args.info, name, overrides)
        except SystemExit as end:
            code = int(end.code or 0)
    print(printed.getvalue(), end="")
    return code


@contextmanager
def _logging_restored() -> Iterator[None]:
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
    typed, plain, found = diagnose.check(composer, rest, config)
    jobs = [] if typed is None else [Job(typed, plain)]
    return jobs, problems + found


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    """Drop problems that repeat another one. Problems are no keys: their values may be lists."""
    return list({(each.word, each.message, each.job): each for each in problems}.values())
