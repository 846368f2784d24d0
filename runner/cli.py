"""The command: words are checked, composed by Hydra, and run.

Nothing here imports torch before the words are known to be right, so that a slip of the fingers, a
``--help`` or a ``--cfg`` costs no more than Python and Hydra do.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from runner.config import Problem, RequestError
from runner.config.compose import (
    CONFIG_NAME,
    VERSION_BASE,
    Request,
    Source,
    help_text,
    register,
    request,
)
from runner.config.folders import find
from runner.config.problem import NOTHING

WRONG_REQUEST = 2
INTERRUPTED = 130

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
    try:
        return _run(words)
    except RequestError as error:
        if not _joins():  # the first rank says it for all
            print(error, file=sys.stderr)
        return WRONG_REQUEST
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as ``head``, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str]) -> int:
    if "--version" in words:
        from runner import __version__

        print(f"clip-runner {__version__} (Hydra {hydra.__version__})")
        return 0
    args, problems = _read(words)
    if problems:
        _add_problems_of_words(args, problems)
        raise RequestError(problems)
    if args.help or args.cfg is not None or args.info is not None:
        return _show(args)
    if args.shell_completion or args.hydra_help:
        register()
        return _hand_to_hydra([*_flags(args), *args.overrides])
    wanted = request(
        args.overrides, multirun=args.multirun, source=_source(args), claims=not _joins()
    )
    if wanted.multirun and _world_size() > 1:
        message = "a sweep starts its own ranks (plugin.nproc): run it without torchrun"
        raise RequestError([Problem("-m", NOTHING, message)])
    _preflight(wanted)
    if _joins():
        from runner import launch

        return launch.join()
    return _hand_to_hydra([*_flags(args), *wanted.words])


def _show(args: argparse.Namespace) -> int:
    """Answer ``--help``, ``--cfg`` or ``--info``."""
    if args.overrides:
        request(args.overrides, source=_source(args), writes=False)
    if args.help:
        print(help_text(args.overrides, _source(args)))
        return 0
    register()
    reports, logging.raiseExceptions = logging.raiseExceptions, False  # ``--info | head``
    try:
        code = _hand_to_hydra([*_flags(args), *args.overrides])
    finally:
        logging.raiseExceptions = reports
    return WRONG_REQUEST if code else 0


def _source(args: argparse.Namespace) -> Source:
    return Source(_path(args.config_path), args.config_name or CONFIG_NAME, _path(args.config_dir))


def _add_problems_of_words(args: argparse.Namespace, problems: list[Problem]) -> None:
    """Where a flag is wrong already, say what else is."""
    try:
        request(args.overrides, multirun=args.multirun, source=_source(args))
    except RequestError as error:
        problems += error.problems


def _read(words: Sequence[str]) -> tuple[argparse.Namespace, list[Problem]]:
    """Hydra's own flags and the overrides, and what is wrong with the flags.

    Raises:
        RequestError: the flags cannot be read at all.
    """
    parser = get_args_parser()
    parser.exit_on_error = False  # what is wrong goes into the one message
    spelled = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        spelled.append(word)
        if word in ("--info", "-i") and "=" in following:
            spelled.append("all")  # what it says by itself, or argparse takes the next word for it
    try:
        args, rest = parser.parse_known_args(spelled)
    except argparse.ArgumentError as error:
        name = error.argument_name or "flags"
        raise RequestError([Problem(name, NOTHING, error.message)]) from None
    problems = [
        Problem(word, NOTHING, "unknown flag; --help and --hydra-help list those there are")
        for word in rest
        if word.startswith("-")
    ]
    problems += _flag_problems(args)
    # argparse takes overrides before or after a flag, not both; here they may stand anywhere.
    args.overrides += [word for word in rest if not word.startswith("-")]
    return args, problems


def _flag_problems(args: argparse.Namespace) -> list[Problem]:
    """Flags that exclude each other, or whose value is wrong; the latter are unset."""
    problems = []
    modes = {
        "-m": args.multirun,
        "--run": args.run,
        "--cfg": args.cfg is not None,
        "--info": args.info is not None,
    }
    chosen = [flag for flag, is_set in modes.items() if is_set]
    if len(chosen) > 1:
        problems.append(Problem(" ".join(chosen), NOTHING, "only one of these can be asked for"))
    if args.resolve and args.cfg is None and not args.help:
        problems.append(Problem("--resolve", NOTHING, "goes with --cfg or --help"))
    if args.experimental_rerun is not None:
        message = "is not supported; the words of a run are in its .hydra/overrides.yaml"
        problems.append(Problem("--experimental-rerun", args.experimental_rerun, message))
    for name in ("config_dir", "config_path"):
        folder = getattr(args, name)
        if folder is not None and not os.path.isdir(folder):
            flag = "--" + name.replace("_", "-")
            problems.append(Problem(flag, folder, "must be a folder that exists"))
            setattr(args, name, None)
    return problems


def _flags(args: argparse.Namespace) -> list[str]:
    """The flags that were given, as words for Hydra."""
    flags = []
    for name in ("help", "hydra_help", "shell_completion", "resolve", "run", "multirun"):
        if getattr(args, name):
            flags.append("--" + name.replace("_", "-"))
    valued = {
        "--cfg": args.cfg,
        "--package": args.package,
        "--info": args.info,
        "--config-path": _path(args.config_path),
        "--config-name": args.config_name,
        "--config-dir": _path(args.config_dir),
    }
    for flag, value in valued.items():
        if value is not None:
            flags += [flag, str(value)]
    return flags


def _preflight(wanted: Request) -> None:
    """Check what needs torch: targets, data and device of each distinct job."""
    from runner import launch

    if _world_size() == 1:
        for job in wanted.jobs:
            launch.prepare(job.config)  # ranks get ready while this process imports torch itself
    from runner import preflight

    problems: list[Problem] = []
    seen: list[dict[str, Any]] = []
    for job in wanted.jobs:
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


@hydra.main(version_base=VERSION_BASE, config_path=str(find("conf")), config_name=CONFIG_NAME)
def job(config: DictConfig) -> float | None:
    """One job, called by Hydra: what a sweeper may optimise, or None where the job failed.

    A job that fails records it itself and does not raise, so that a sweep goes on.
    """
    from runner import launch

    content = OmegaConf.to_container(config, resolve=True)
    assert isinstance(content, dict)
    plain = {str(key): value for key, value in content.items()}
    settings = HydraConfig.get()
    try:
        outcome = launch.run(
            plain, Path(settings.runtime.output_dir), list(settings.overrides.task)
        )
    except RequestError as error:
        print(error, file=sys.stderr)
        _exit_codes.append(WRONG_REQUEST)
        return None
    _exit_codes.append(outcome.exit_code)
    return outcome.objective if outcome.exit_code == 0 else None


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


def _joins() -> bool:
    """Whether an outer launcher started this process as a rank other than the first."""
    return _world_size() > 1 and int(os.environ.get("RANK") or 0) > 0


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1) if "RANK" in os.environ else 1


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).absolute()
