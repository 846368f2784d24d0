"""The first thing that runs: shows a sign of life, then imports the command.

It imports nothing of its own, so that a terminal is not blank while Python imports Hydra, and so
that Ctrl-C in that time ends in one line as it does later.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module


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
