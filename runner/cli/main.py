"""The entry of every command: ``python -m runner [COMMAND] [OVERRIDES] [FLAGS]``.

Without a command the overrides ask for a run. The module of a command is imported only after a
first line was printed. A terminal is then not blank while Python imports Hydra, and Ctrl-C in that
time ends in one line as it does later.
"""

import io
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from inspect import getdoc

from runner.checkpoint.folder import DamagedCheckpoint
from runner.cli.answer import (
    FLAG,
    Answer,
    content_of_failure,
    content_of_refusal,
    printing_to_stderr,
    text_of,
)
from runner.config.environment import join_slurm_step, joins, started_rank
from runner.config.notation import in_one_line
from runner.config.problem import NOTHING, Problem, RefusedOnAllRanks, RequestError, near_name
from runner.config.reading import DamagedFile
from runner.launch import signals
from runner.launch.failure import Failure
from runner.run_folder.strict_json import disk_full
from runner.telemetry.sinks import ending
from runner.telemetry.sinks.console import (
    announce,
    leave_unread,
    open_streams,
    print_json,
    print_line,
)
from runner.workarounds import search_no_plugins_of_pydantic

COMMANDS = {
    "bench": "measure",
    "calibrate": "measure",
    "evaluate": "measure",
    "verify": "measure",
    "dashboard": "pages",
    "export": "pages",
    "new": "pages",
    "report": "pages",
    "plan": "run",
    "run": "run",
}
"""Commands, each with its module, which has a function ``COMMAND(argv)``.

It returns an exit code, or an :class:`Answer` with what ``--json`` prints.
"""

TRAINING = ("calibrate", "evaluate", "plan", "run", "verify")
"""Commands that may be started on several ranks, by torchrun or in a step of Slurm."""

FINISHED = 0
FAILED = 1
WRONG_REQUEST = 2
INTERRUPTED = 130
"""Exit codes. A run that another signal stopped ends with 129 (SIGHUP) or 143."""


def start() -> int:
    """Run the command line of this process, and return its exit code: the console script's."""
    open_streams()
    signals.listen()
    if not sys.flags.safe_path:  # the console script imports from here, as python -m does
        with suppress(FileNotFoundError):  # the directory was removed
            sys.path.insert(0, os.getcwd())
    code = main(sys.argv[1:])
    signals.ignore()  # only the end of the interpreter is left, which has no good answer to them
    if code > 128:
        signals.requeue()
    if code and started_rank() is not None:
        sys.stderr.flush()
        os._exit(code)  # the end of the interpreter would wait for ranks that may be gone
    return code


def main(argv: Sequence[str]) -> int:
    """Run a command, and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may have no ‖
    _set_environment()
    words = list(argv)
    if FLAG not in words or "report" in words[:2]:
        return _answer(words).exit_code
    words.remove(FLAG)
    with printing_to_stderr():
        try:
            answer = _answer(words)
        except Exception as error:  # a fault of this program
            traceback.print_exc()
            answer = Answer(FAILED, {"error": in_one_line(error)})
    if not joins():
        print_json(text_of(answer))
    return answer.exit_code


def _answer(argv: list[str]) -> Answer:
    """Run a command, print what ended it early, and return its answer."""
    try:
        answer = _answer_or_exit(argv)
        sys.stdout.flush()  # at the end of the interpreter a broken pipe could not be caught
    except RequestError as error:
        _print_once(error)
        return Answer(WRONG_REQUEST, content_of_refusal(error))
    except KeyboardInterrupt as interrupt:
        if not isinstance(interrupt, signals.Interrupted) and not joins():
            print_line("interrupted", sys.stderr)
        return Answer(INTERRUPTED)
    except BrokenPipeError:
        leave_unread(sys.stdout)
        return Answer(FINISHED)
    except Failure as failure:
        print_line(f"clip-runner: {failure.line}", sys.stderr)
        return Answer(failure.exit_code, content_of_failure(failure))
    except (DamagedCheckpoint, DamagedFile, OSError) as error:  # such as a disk that is full
        why = disk_full(error) or str(error)
        print_line(f"clip-runner: {why}", sys.stderr)
        return Answer(FAILED, {"error": why})
    return answer


def _set_environment() -> None:
    """Set the variables that libraries read when they are imported, unless the user has."""
    # Threads that wait for work spin for microseconds, then sleep. By default they spin for
    # milliseconds: beside another process, a small net's step takes 3 to 10 times as long.
    if os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE") == "PASSIVE":
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    search_no_plugins_of_pydantic()


def _answer_or_exit(argv: list[str]) -> Answer:
    """Run a command, and return its answer, also if it ends by SystemExit."""
    try:
        return _command(argv)
    except SystemExit as end:  # argparse, or a run that was terminated
        code = end.code if isinstance(end.code, int) else FAILED
        if isinstance(end, signals.Terminated) and not joins():
            print_line(ending(code), sys.stderr)
        return Answer(code)


def _print_once(error: RequestError) -> None:
    """Print a wrong request; if all ranks refuse it, on one rank of each machine."""
    if isinstance(error, RefusedOnAllRanks) and not _is_first_of_machine():
        # torchrun ends all ranks with the first that fails: not before the message is printed.
        time.sleep(5.0)
    else:
        print_line(str(error), sys.stderr)


def _is_first_of_machine() -> bool:
    started = started_rank()
    return started is None or started.rank == 0 or started.local_rank == 0


def _command(argv: list[str]) -> Answer:
    """Import the module of a command, and return the answer of the command."""
    if argv and argv[0].isalpha() and argv[0] not in COMMANDS:
        suggestion = near_name(argv[0], COMMANDS)
        if suggestion:
            message = f"is no command; did you mean {suggestion}?"
            raise RequestError([Problem(argv[0], NOTHING, message, suggestion)])
    command = argv.pop(0) if argv and argv[0] in COMMANDS else "run"
    module = COMMANDS[command]
    if "--version" in argv:
        _print_version()
        return Answer(FINISHED)
    flags = {argument for argument in argv if argument.startswith("-")}
    if command in TRAINING:
        join_slurm_step()
        if flags <= {"-m", "--multirun"}:
            announce("clip-runner: reading the configuration")
    with signals.deferred():
        run_command = getattr(import_module(f"runner.cli.{module}"), command)
    if flags & {"-h", "--help"} and command in ("calibrate", "plan", "verify"):
        print(getdoc(run_command))
        return Answer(FINISHED)
    try:
        returned = run_command(argv)
    except RequestError as error:
        if command not in TRAINING:
            raise
        raise _refused(error) from None
    return returned if isinstance(returned, Answer) else Answer(int(returned))


def _print_version() -> None:
    from importlib.metadata import version

    from runner import __version__

    print(f"clip-runner {__version__} (Hydra {version('hydra-core')})")


def _refused(error: RequestError) -> RequestError:
    """Return a wrong request as an error that all ranks raise, if several are started."""
    started = started_rank()
    if started is None or started.world_size == 1:
        return error
    with signals.deferred():
        from runner.launch.agreement import refused_on_all_ranks
    return refused_on_all_ranks(error)
