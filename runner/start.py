"""The first thing that runs: shows a sign of life, then imports the command.

It imports nothing of its own, so that a terminal is not blank while Python imports Hydra, and so
that Ctrl-C in that time ends in one line as it does later. What commands print goes through
`print_line`, which every module can import from here.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import TextIO


def start(module: str = "runner.cli") -> int:
    """Run the function ``main`` of ``module`` on ``sys.argv``; its exit code, 130 after Ctrl-C."""
    try:
        if not any(
            word.startswith("-") and word not in ("-m", "--multirun") for word in sys.argv[1:]
        ):
            announce("clip-runner: reading the configuration")
        code = int(import_module(module).main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    # Only the end of the interpreter is left, which has no good answer to an interrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def announce(line: str) -> None:
    """Print what is being done, if a person watches and no outer launcher starts many of us."""
    try:
        watched = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    except (AttributeError, ValueError):  # closed
        return
    if watched:
        print(line, "...", file=sys.stderr, flush=True)


def print_line(text: str = "", stream: TextIO | None = None) -> None:
    """Print ``text`` at once; a reader that left does not change how the command ends.

    Args:
        text: the line, or several.
        stream: where to print it; stdout by default.
    """
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        leave_unread(stream)


def leave_unread(stream: TextIO) -> None:
    """Discard what is printed on ``stream`` from now on: its reader, such as ``head``, has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
