"""Print to a terminal or a pipe whose reader may leave early.

This module imports neither Hydra nor torch, so that a command can print before it does.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

from runner.config import disk
from runner.config.environment import started_rank


def announce(line: str) -> None:
    """Print what is being done, on the first rank and only if standard error is a terminal."""
    try:
        started = started_rank()
        watched = sys.stderr.isatty() and (started is None or started.rank == 0)
    except (AttributeError, ValueError):  # closed
        return
    if watched:
        print(line, "...", file=sys.stderr, flush=True)


def print_line(text: str = "", stream: TextIO | None = None) -> None:
    """Print ``text`` at once. A reader that left does not change how the command ends."""
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        leave_unread(stream)
    except OSError as error:
        if not disk.is_full(error):  # of the file that the stream goes to
            raise


def open_streams() -> None:
    """Discard what is printed on a standard stream that is closed (``>&-``)."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def leave_unread(stream: TextIO) -> None:
    """Discard what is printed on ``stream`` from now on: its reader, such as ``head``, has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
