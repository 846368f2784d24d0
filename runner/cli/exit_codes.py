"""The exit codes of commands, and the one message of a wrong request."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from runner.config.problem import Interrupted, RequestError
from runner.config.sizes import joins
from runner.telemetry.sinks.console import leave_unread, print_line

WRONG_REQUEST = 2

INTERRUPTED = 130

LISTENING = 5.0
"""Seconds that a rank waits with its exit while another one prints why the request is wrong."""


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


def _speaks() -> bool:
    """Whether this process prints what is wrong: one on each machine does."""
    return not joins() or os.environ.get("LOCAL_RANK") == "0"
