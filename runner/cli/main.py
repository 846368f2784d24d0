"""The entry of every command: ``python -m runner [COMMAND] [OVERRIDES] [FLAGS]``.

Without a command the overrides are those of a run. The module of a command is imported only after
a first line was printed, so that a terminal is not blank while Python imports Hydra, and so that
Ctrl-C in that time ends in one line as it does later.
"""

import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from inspect import getdoc

from runner.checkpoint.folder import DamagedCheckpoint
from runner.config.environment import join_slurm_step, joins, started_rank
from runner.config.problem import RefusedOnAllRanks, RequestError
from runner.config.reading import DamagedFile
from runner.launch import signals
from runner.launch.failure import Failure
from runner.run_folder.strict_json import disk_full
from runner.telemetry.sinks import ending
from runner.telemetry.sinks.console import announce, leave_unread, open_streams, print_line

COMMANDS = {
    **dict.fromkeys(("bench", "calibrate", "evaluate", "verify"), "measure"),
    **dict.fromkeys(("dashboard", "export", "new", "report"), "pages"),
    **dict.fromkeys(("plan", "run"), "run"),
}
"""Commands, each with its module, which has a function ``COMMAND(arguments) -> exit code``."""

FAILED, WRONG_REQUEST, INTERRUPTED = 1, 2, 130
"""Exit codes; that of a run that another signal stopped is 129 (SIGHUP) or 143."""


def start() -> int:
    """Run the command line of this process; the console script calls this."""
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


def main(arguments: Sequence[str]) -> int:
    """Run a command, and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may have no ‖
    # Threads that wait for work spin for microseconds, then sleep. By default they spin for
    # milliseconds: beside another process, a small net's step takes 3 to 10 times as long.
    if os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE") == "PASSIVE":
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # pydantic would search all installed packages for plugins, which takes as long as a check.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    code = 0
    try:
        try:
            code = _command(list(arguments))
        except SystemExit as end:  # argparse, or a run that was terminated
            code = end.code if isinstance(end.code, int) else FAILED
            if isinstance(end, signals.Terminated) and not joins():
                print_line(ending(code), sys.stderr)
        sys.stdout.flush()  # at the end of the interpreter a broken pipe could not be caught
    except RequestError as error:
        if isinstance(error, RefusedOnAllRanks) and not _is_first_of_machine():
            # torchrun ends all ranks with the first that fails: not before the message is printed.
            time.sleep(5.0)
        else:
            print_line(str(error), sys.stderr)
        code = WRONG_REQUEST
    except KeyboardInterrupt as interrupt:
        if not isinstance(interrupt, signals.Interrupted) and not joins():
            print_line("interrupted", sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        leave_unread(sys.stdout)
    except Failure as failed:
        print_line(f"clip-runner: {failed.line}", sys.stderr)
        code = failed.exit_code
    except (
        DamagedCheckpoint,
        DamagedFile,
        OSError,
    ) as error:  # such as a file that cannot be written
        print_line(f"clip-runner: {disk_full(error) or error}", sys.stderr)
        code = FAILED
    return code


def _command(arguments: list[str]) -> int:
    command = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "run"
    if "--version" in arguments:
        from importlib.metadata import version

        from runner import __version__

        print(f"clip-runner {__version__} (Hydra {version('hydra-core')})")
        return 0
    trains = command != "bench" and COMMANDS[command] != "pages"
    if trains:
        join_slurm_step()
    flags = {argument for argument in arguments if argument.startswith("-")}
    if trains and flags <= {"-m", "--multirun"}:
        announce("clip-runner: reading the configuration")
    with signals.deferred():
        work = getattr(import_module(f"runner.cli.{COMMANDS[command]}"), command)
    if flags & {"-h", "--help"} and command in ("calibrate", "plan", "verify"):
        print(getdoc(work))
        return 0
    try:
        return int(work(arguments))
    except RequestError as error:
        started = started_rank()
        if not trains or started is None or started.world_size == 1:
            raise
        with signals.deferred():
            from runner.launch.agreement import refused_on_all_ranks
        raise refused_on_all_ranks(error) from None


def _is_first_of_machine() -> bool:
    started = started_rank()
    return started is None or started.rank == 0 or started.local_rank == 0
