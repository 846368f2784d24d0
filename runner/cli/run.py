"""``python -m runner [OVERRIDES]``: check the overrides, compose by Hydra, and run.

torch is imported only after the overrides are validated, so that a typing error, ``--help`` and
``--cfg`` cost no more than Python and Hydra do.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.cli import flags
from runner.cli.checks import add_problems_of_overrides, check_jobs, note, tell_version
from runner.cli.exit_codes import WRONG_REQUEST, guarded
from runner.compose.request import (
    VERSION_BASE,
    Request,
    help_text,
    register,
    request,
)
from runner.config.folders import CONFIG_NAME, find
from runner.config.problem import NOTHING, Problem, RequestError
from runner.config.sizes import joined_ranks, joins
from runner.config.tensor_plan import settled
from runner.run_folder.earlier import earlier_record
from runner.telemetry.sinks.console import print_line

# Exit codes of the jobs that ran in this process since `main` began.
_exit_codes: list[int] = []


def main(argv: Sequence[str] | None = None) -> int:
    """Run the request that the words ``argv`` make (``sys.argv[1:]`` by default).

    Returns:
        0 where every run finished, 1 where one failed, 2 where the request was wrong (one message
        on stderr, nothing created), 130 where it was interrupted, 143 where it was terminated.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _exit_codes.clear()
    return guarded(lambda: _run(words))


def _run(words: list[str]) -> int:
    if "--version" in words:
        return tell_version()
    args, problems = flags.read(words)
    if problems:
        add_problems_of_overrides(args, problems)
        raise RequestError(problems)
    if args.help or args.cfg is not None or args.info is not None:
        return _show(args)
    if args.shell_completion or args.hydra_help:
        return _printed_by_hydra(args)
    wanted = request(
        args.overrides,
        multirun=args.multirun,
        source=flags.source_of(args),
        earlier=None if joins() else earlier_record,  # the first rank may have begun the record
    )
    note(wanted.notes)
    if wanted.sweep is not None:
        return _sweep(wanted, args, words)
    check_jobs(wanted.jobs)
    if joins():
        from runner.launch.dispatch import join

        return join()
    return _hand_to_hydra([*flags.words_of(args), *wanted.words])


def _sweep(wanted: Request, args: argparse.Namespace, typed: Sequence[str]) -> int:
    """Run what is left of a sweep."""
    from runner import sweep

    if (joined_ranks() or 1) > 1:
        message = "a sweep starts its own ranks (plugin.nproc): run it without torchrun"
        raise RequestError([Problem("-m", NOTHING, message)])
    given = [word for word in flags.words_of(args) if word != "--multirun"]
    return sweep.run_sweep(
        wanted, typed, check_jobs, lambda words: _hand_to_hydra([*given, "--multirun", *words])
    )


def _show(args: argparse.Namespace) -> int:
    """Answer ``--help``, ``--cfg`` or ``--info``."""
    if args.overrides or args.config_name:
        request(args.overrides, source=flags.source_of(args), writes=False)
    if args.help:
        print(help_text(args.overrides, flags.source_of(args)))
        return 0
    return WRONG_REQUEST if _printed_by_hydra(args) else 0


def _printed_by_hydra(args: argparse.Namespace) -> int:
    """Print what Hydra answers to ``args``; its exit code.

    Hydra would report a reader that leaves early, as in ``--info | head``, as a failure of its own:
    it prints into memory here, and this process to the terminal.
    """
    register()
    answer = io.StringIO()
    with redirect_stdout(answer):
        code = _hand_to_hydra([*flags.words_of(args), *args.overrides])
    print(answer.getvalue(), end="")
    return code


@hydra.main(version_base=VERSION_BASE, config_path=str(find("conf")), config_name=CONFIG_NAME)
def job(config: DictConfig) -> float | None:
    """One job, called by Hydra: what a sweeper may optimise, or None where the job failed.

    A job that fails records it itself and does not raise, so that a sweep goes on.
    """
    from runner.launch import supervise

    content = OmegaConf.to_container(config, resolve=True)
    assert isinstance(content, dict)
    plain = settled({str(key): value for key, value in content.items()})
    settings = HydraConfig.get()
    if settings.mode == RunMode.MULTIRUN:
        return _job_of_sweep(plain, settings)
    try:
        outcome = supervise.run(
            plain, Path(settings.runtime.output_dir), list(settings.overrides.task)
        )
    except RequestError as error:
        print_line(str(error), sys.stderr)
        _exit_codes.append(WRONG_REQUEST)
        return None
    _exit_codes.append(outcome.exit_code)
    return outcome.objective if outcome.exit_code == 0 else None


def _job_of_sweep(plain: dict[str, Any], settings: Any) -> float | None:
    from runner import sweep
    from runner.launch import supervise

    folder = Path(settings.sweep.dir)
    return sweep.run_job(
        partial(supervise.run, tells=False, swept=sweep.SweepRecord.read(folder).keys),
        folder,
        settings.job.num,
        plain,
        Path(settings.runtime.output_dir),
        list(settings.overrides.task),
        in_process=settings.launcher._target_.endswith(".BasicLauncher"),
    )


def _hand_to_hydra(words: Sequence[str]) -> int:
    """Let Hydra do what ``words`` ask for; the worst exit code of its jobs."""
    before = sys.argv
    sys.argv = [before[0] if before else "clip-runner", *words]
    try:
        with _logging_restored():
            job()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return max([end.code or 0, *_exit_codes])
        print(end.code, file=sys.stderr)
        return 1
    finally:
        sys.argv = before
    return max(_exit_codes, default=0)


@contextmanager
def _logging_restored() -> Iterator[None]:
    """Close the log files that Hydra opens, and leave the caller's logging as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
