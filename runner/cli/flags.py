"""Hydra's own flags on the command line, such as ``-m`` and ``--cfg``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser

from runner.compose.request import Source
from runner.config.folders import CONFIG_NAME
from runner.config.problem import NOTHING, Problem, RequestError
from runner.run_folder import files


def read(words: Sequence[str]) -> tuple[argparse.Namespace, list[Problem]]:
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
        message = f"is not supported; the overrides of a run are in its {files.OVERRIDES}"
        problems.append(Problem("--experimental-rerun", args.experimental_rerun, message))
    for name in ("config_dir", "config_path"):
        folder = getattr(args, name)
        if folder is not None and not os.path.isdir(folder):
            flag = "--" + name.replace("_", "-")
            problems.append(Problem(flag, folder, "must be a folder that exists"))
            setattr(args, name, None)
    return problems


def words_of(args: argparse.Namespace) -> list[str]:
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


def source_of(args: argparse.Namespace) -> Source:
    """Where the flags say that the configuration is read."""
    return Source(_path(args.config_path), args.config_name or CONFIG_NAME, _path(args.config_dir))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).absolute()
