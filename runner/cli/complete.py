"""``clip-runner -sc install=SHELL``: complete commands, flags, groups, options and keys in a shell.

The script of a shell asks ``-sc query=SHELL``, with the line up to the cursor in ``COMP_LINE``, and
gets one candidate a line. Hydra completes overrides, also those of ``--config-dir``.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.plugins.completion_plugin import DefaultCompletionPlugin

from runner.cli.shells import SCRIPTS
from runner.compose.composer import Composer, Source
from runner.config.folders import CONFIG_NAME
from runner.config.problem import Problem, RequestError, did_you_mean

OVERRIDDEN = ("run", "plan", "calibrate", "verify", "evaluate")
"""Commands that take overrides."""

_SOURCE = {"--config-dir": "extra", "--config-path": "path", "--config-name": "name"}
_SHORT = {"-cd": "--config-dir", "-cp": "--config-path", "-cn": "--config-name"}
_FILES = ("evaluate", "export", "report", "schema")
"""Commands that take the path of a file or a folder."""


def main(asked: Sequence[str], commands: Sequence[str]) -> int:
    """Print the script of a shell, or candidates for the line in ``COMP_LINE``.

    Args:
        asked: ``install=SHELL`` or ``query=SHELL``.
        commands: names of all commands.

    Raises:
        RequestError: there is no script for this shell.
    """
    what, _, shell = (asked[0] if asked else "").partition("=")
    if what not in ("install", "query") or shell not in SCRIPTS:
        shells = ", ".join(f"install={name}" for name in SCRIPTS)
        near = did_you_mean(shell, SCRIPTS)
        message = f"must be one of {shells}{near}"
        raise RequestError([Problem("--shell-completion", " ".join(asked), message)])
    if what == "install":
        print(SCRIPTS[shell], end="")
        return 0
    line = os.environ.get("COMP_LINE", "")
    found: Iterable[str] = ()
    # A shell that completes shows no errors.
    with suppress(Exception), redirect_stderr(io.StringIO()):
        found = candidates(line[: int(os.environ.get("COMP_POINT") or len(line))], commands)
    print("\n".join(found))
    return 0


def candidates(line: str, commands: Sequence[str]) -> list[str]:
    """Return what the last word of a command line may become.

    Args:
        line: the line up to the cursor, which begins with the program.
        commands: names of all commands.
    """
    *words, current = _words(line)
    if any(Path(word).name.startswith("python") for word in words[:1]):
        words = words[words.index("runner") :]
    words = words[1:]
    first = not words
    command = words.pop(0) if words and words[0] in commands else "run"
    before = _SHORT.get(words[-1], words[-1]) if words else ""
    if before in ("--config-dir", "--config-path", "--output"):
        return _paths(current)
    if current.startswith("-"):
        found = _flags(command)
    else:
        found = [*commands] if first else []
        if command in OVERRIDDEN:
            found += _overrides(words, current)
        if command in _FILES:
            found += _paths(current)
        if command == "bench":
            found += import_module("runner.bench").TABLES
    return sorted({word for word in found if word.startswith(current)})


def _words(line: str) -> list[str]:
    """Split a line; the last word is the one at the cursor, and may be empty."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote is still open
        words = line.split()
    return words if words and not line.endswith(" ") else [*words, ""]


def _flags(command: str) -> list[str]:
    if command == "run":
        found = [name for action in get_args_parser()._actions for name in action.option_strings]
        return [*found, "--version"]
    if command in OVERRIDDEN[1:-1]:
        return [*_SOURCE, *_SHORT, "--help", *(["--multirun", "-m"] if command == "plan" else [])]
    module = import_module(f"runner.cli.{command}")
    shown = io.StringIO()
    if not hasattr(module, "USAGE"):
        with suppress(SystemExit), redirect_stdout(shown):
            module.main(["--help"])
    text = getattr(module, "USAGE", "") + shown.getvalue()
    return ["--help", *re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)]


def _overrides(words: Sequence[str], current: str) -> list[str]:
    """Return groups, options, keys and values; of a list of values, the last one is completed."""
    key, _, value = current.partition("=")
    listed, comma, last = value.rpartition(",")
    begun = f"{key}={last}" if comma else current
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for short, flag in _SHORT.items():
        parser.add_argument(short, flag, dest=_SOURCE[flag])
    given, rest = parser.parse_known_args(words)
    path, extra = (
        None if one is None else Path(one).absolute() for one in (given.path, given.extra)
    )
    source = Source(path, given.name or CONFIG_NAME, extra)
    composer = Composer(source)
    settled = [word for word in rest if "=" in word and not word.startswith("-")]
    with composer.active():
        query = DefaultCompletionPlugin(composer.loader)._query
        found = query(
            source.name, " ".join([*settled, begun]) if begun else " ".join(settled) + " "
        )
    return [f"{key}={listed},{one.partition('=')[2]}" for one in found] if comma else found


def _paths(current: str) -> list[str]:
    folder, name = os.path.split(current)
    return sorted(
        os.path.join(folder, one.name) + ("/" if one.is_dir() else "")
        for one in Path(folder or ".").expanduser().iterdir()
        if one.name.startswith(name)
    )
