"""What every command does with its arguments: read them, check them, and print notes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import hydra

from runner.cli import flags
from runner.cli.exit_codes import guarded
from runner.compose.request import Job, request
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.sizes import joined_ranks, joins, may_grow
from runner.run_folder.earlier import earlier_record
from runner.telemetry.sinks.console import announce, print_line


def answer(argv: Sequence[str] | None, usage: str, run: Callable[[list[str]], int]) -> int:
    """Answer ``--help`` and ``--version`` of a command, or run it.

    Args:
        argv: arguments of the command; ``sys.argv[1:]`` by default.
        usage: what ``--help`` prints.
        run: the command, which takes its arguments and returns its exit code.

    Returns:
        The exit code, see :func:`runner.cli.exit_codes.guarded`.
    """
    words = list(sys.argv[1:] if argv is None else argv)

    def command() -> int:
        if {"-h", "--help"} & set(words):
            print(usage)
            return 0
        return tell_version() if "--version" in words else run(words)

    return guarded(command)


def tell_version() -> int:
    """Print this project's version, and Hydra's; the exit code."""
    from runner import __version__

    print(f"clip-runner {__version__} (Hydra {hydra.__version__})")
    return 0


def read(words: Sequence[str], purpose: str, also: Sequence[str] = ()) -> argparse.Namespace:
    """The overrides in ``words``, and the flags that say where the configuration is read.

    Args:
        words: of another command of this project.
        purpose: what that command makes, to tell which flags do not go with it.
        also: further flags that do.

    Raises:
        RequestError: a flag is wrong; it names all that is.
    """
    args, problems = flags.read(words)
    plain = ("--config-path", "--config-name", "--config-dir", *also)
    problems += [
        Problem(flag, NOTHING, f"does not go with {purpose}")
        for flag in flags.words_of(args)
        if flag.startswith("--") and flag not in plain
    ]
    if problems:
        add_problems_of_overrides(args, problems)
        raise RequestError(problems)
    return args


def single(words: Sequence[str], purpose: str) -> Job:
    """The one job that ``words`` ask for, checked as a run is; nothing is created.

    Args:
        words: overrides, and the flags that say where the configuration is read.
        purpose: what the job is for, to tell why it must be one.

    Raises:
        RequestError: anything is wrong; it names all of it.
    """
    args = read(words, purpose)
    wanted = request(args.overrides, source=flags.source_of(args), writes=False)
    if wanted.multirun:
        message = f"{purpose} is of one run: leave out what makes a sweep of it"
        raise RequestError([Problem("hydra.mode", "MULTIRUN", message)])
    note(wanted.notes)
    check_jobs(wanted.jobs)
    return wanted.jobs[0]


def add_problems_of_overrides(args: argparse.Namespace, problems: list[Problem]) -> None:
    """Where a flag is wrong already, say what else is."""
    try:
        request(
            args.overrides,
            multirun=args.multirun,
            source=flags.source_of(args),
            earlier=earlier_record,
        )
    except RequestError as error:
        problems += error.problems


def check_jobs(jobs: Sequence[Job]) -> None:
    """Check what needs torch: targets, data and device of each distinct job."""
    from runner.launch import local_ranks

    if "torch" not in sys.modules:
        announce("clip-runner: importing torch, then checking model and data")
    if (joined_ranks() or 1) == 1:
        for job in jobs:
            local_ranks.prepare(job.config)  # ranks import torch while this process does
    from runner.train import preflight

    problems: list[Problem] = []
    seen: list[dict[str, Any]] = []
    for job in jobs:
        if job.plain in seen:
            continue
        seen.append(job.plain)
        try:
            preflight.check(job.config, job.plain)
        except RequestError as error:
            problems += (replace(problem, job=job.label) for problem in error.problems)
    if problems:
        raise RequestError(problems)
    note(_one_rank(jobs))


def _one_rank(jobs: Sequence[Job]) -> list[str]:
    """A sentence for each plugin that spreads a run, but has one rank unless more are asked for."""
    growing = [job.config for job in jobs if may_grow(job.config.plugin)]
    if joined_ranks() is not None or not growing:
        return []
    from runner.train import build

    names = {config.plugin.name for config in growing if build.ranks_of(config) == 1}
    return [
        f"plugin={name} runs on one rank: plugin.nproc is not given, and this run uses at most one "
        "GPU. plugin.nproc=2 starts two ranks."
        for name in sorted(names)
    ]


def note(sentences: Iterable[str]) -> None:
    """Print ``sentences`` to standard error, on the first rank alone."""
    for sentence in () if joins() else sentences:
        print_line(f"clip-runner: note: {sentence}", sys.stderr)
