"""The entry of every command: ``python -m runner [COMMAND] [OVERRIDES] [FLAGS]``.

Without a command the overrides are those of a run. The module of a command is imported only after
a sign of life was printed, so that a terminal is not blank while Python imports Hydra, and so that
Ctrl-C in that time ends in one line as it does later.
"""

from __future__ import annotations

import signal
import sys
from difflib import get_close_matches
from importlib import import_module

from runner.telemetry.sinks.console import announce

COMMANDS = ("calibrate", "dashboard", "plan", "report", "run", "verify")
"""Each is a module of :mod:`runner.cli` with a function ``main(arguments) -> exit code``."""


def start() -> int:
    """Run the command that ``sys.argv`` names, and return its exit code.

    Returns:
        What the command returns; 130 after Ctrl-C, and 2 for a name that is nearly a command.
    """
    command, arguments = "run", sys.argv[1:]
    first = arguments[0] if arguments else ""
    if first in COMMANDS:
        command, *arguments = arguments
    elif "=" not in first and (meant := get_close_matches(first, COMMANDS, 1)):
        print(f"clip-runner: {first} is no command: did you mean {meant[0]}?", file=sys.stderr)
        return 2
    try:
        if command not in ("dashboard", "report") and not any(
            argument.startswith("-") and argument not in ("-m", "--multirun")
            for argument in arguments
        ):
            announce("clip-runner: reading the configuration")
        code = int(import_module(f"runner.cli.{command}").main(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    # Only the end of the interpreter is left, which has no good answer to an interrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code
