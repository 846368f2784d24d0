"""The command: words are checked, composed by Hydra, and run.

Nothing here imports torch before the words are known to be right, so that a slip of the fingers, a
``--help`` or a ``--cfg`` costs no more than Python and Hydra do.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner import flags
from runner.config import Problem, RequestError
from runner.config.compose import (
    CONFIG_NAME,
    VERSION_BASE,
    Job,
    Request,
    help_text,
    register,
    request,
)
from runner.config.folders import find
from runner.config.problem import NOTHING, Interrupted
from runner.config.sizes import may_grow
from runner.config.tensor_plan import settled
from runner.start import announce, leave_unread, print_line

WRONG_REQUEST = 2
INTERRUPTED = 130

LISTENING = 5.0
"""Seconds that a rank waits with its exit while another one prints why the request is wrong."""

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


def guarded(command: Callable[[], int]) -> int:
    """What ``command`` returns; the exit code of a wrong request, an interrupt or a broken pipe."""
    # Threads of torch that wait in sleep: spinning ones make a small net's step ten times slower
    # as soon as anything else wants a core. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = command()
        try:
            sys.stdout.flush()  # at the end of the interpreter a broken pipe could not be caught
        except BrokenPipeError:
            leave_unread(sys.stdout)
        return code
    except RequestError as error:
        if _speaks():
            print_line(str(error), sys.stderr)
        else:
            # torchrun ends all ranks with the first that fails: not before the message is printed.
            time.sleep(LISTENING)
        return WRONG_REQUEST
    except KeyboardInterrupt as interrupt:
        if not isinstance(interrupt, Interrupted) and not joins():
            print_line("interrupted", sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        leave_unread(sys.stdout)
        return 0


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
        _add_problems_of_words(args, problems)
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


def _run(words: list[str]) -> int:
    if "--version" in words:
        return tell_version()
    args, problems = flags.read(words)
    if problems:
        _add_problems_of_words(args, problems)
        raise RequestError(problems)
    if args.help or args.cfg is not None or args.info is not None:
        return _show(args)
    if args.shell_completion or args.hydra_help:
        return _printed_by_hydra(args)
    wanted = request(
        args.overrides, multirun=args.multirun, source=flags.source_of(args), claims=not joins()
    )
    note(wanted.notes)
    if wanted.sweep is not None:
        return _sweep(wanted, args, words)
    check_jobs(wanted.jobs)
    if joins():
        from runner import launch

        return launch.join()
    return _hand_to_hydra([*flags.words_of(args), *wanted.words])


def _sweep(wanted: Request, args: argparse.Namespace, typed: Sequence[str]) -> int:
    """Run what is left of a sweep."""
    from runner import sweep

    if _world_size() > 1:
        message = "a sweep starts its own ranks (plugin.nproc): run it without torchrun"
        raise RequestError([Problem("-m", NOTHING, message)])
    given = [word for word in flags.words_of(args) if word != "--multirun"]
    return sweep.conduct(
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


def _add_problems_of_words(args: argparse.Namespace, problems: list[Problem]) -> None:
    """Where a flag is wrong already, say what else is."""
    try:
        request(args.overrides, multirun=args.multirun, source=flags.source_of(args))
    except RequestError as error:
        problems += error.problems


def check_jobs(jobs: Sequence[Job]) -> None:
    """Check what needs torch: targets, data and device of each distinct job."""
    from runner import launch

    if "torch" not in sys.modules:
        announce("clip-runner: importing torch, then checking model and data")
    if _world_size() == 1:
        for job in jobs:
            launch.prepare(job.config)  # ranks get ready while this process imports torch itself
    from runner import preflight

    problems: list[Problem] = []
    seen: list[dict[str, Any]] = []
    for job in jobs:
        if job.plain in seen:
            continue
        seen.append(job.plain)
        try:
            preflight.check(job.config, job.plain)
        except RequestError as error:
            problems += (
                Problem(problem.key, problem.value, problem.message, job.label)
                for problem in error.problems
            )
    if problems:
        raise RequestError(problems)
    note(_one_rank(jobs))


def _one_rank(jobs: Sequence[Job]) -> list[str]:
    """A sentence for each plugin that spreads a run, but has one rank unless more are asked for."""
    growing = [job.config for job in jobs if may_grow(job.config.plugin)]
    if "RANK" in os.environ or not growing:
        return []
    from runner import build

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


@hydra.main(version_base=VERSION_BASE, config_path=str(find("conf")), config_name=CONFIG_NAME)
def job(config: DictConfig) -> float | None:
    """One job, called by Hydra: what a sweeper may optimise, or None where the job failed.

    A job that fails records it itself and does not raise, so that a sweep goes on.
    """
    from runner import launch

    content = OmegaConf.to_container(config, resolve=True)
    assert isinstance(content, dict)
    plain = settled({str(key): value for key, value in content.items()})
    settings = HydraConfig.get()
    if settings.mode == RunMode.MULTIRUN:
        return _job_of_sweep(plain, settings)
    try:
        outcome = launch.run(
            plain, Path(settings.runtime.output_dir), list(settings.overrides.task)
        )
    except RequestError as error:
        print_line(str(error), sys.stderr)
        _exit_codes.append(WRONG_REQUEST)
        return None
    _exit_codes.append(outcome.exit_code)
    return outcome.objective if outcome.exit_code == 0 else None


def _job_of_sweep(plain: dict[str, Any], settings: Any) -> float | None:
    from runner import launch, sweep

    folder = Path(settings.sweep.dir)
    return sweep.run_job(
        partial(launch.run, tells=False, swept=sweep.SweepRecord.read(folder).keys),
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


def _speaks() -> bool:
    """Whether this process prints what is wrong: one on each machine does."""
    return not joins() or os.environ.get("LOCAL_RANK") == "0"


def joins() -> bool:
    """Whether an outer launcher started this process as a rank other than the first."""
    return _world_size() > 1 and int(os.environ.get("RANK") or 0) > 0


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1) if "RANK" in os.environ else 1
