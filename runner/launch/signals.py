"""Signals that ask a run to stop: SIGTERM, SIGINT, SIGHUP, and SIGUSR1 (Slurm's pre-emption)."""

from __future__ import annotations

import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from runner.config.environment import slurm_job, started_rank
from runner.train import stop

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

# Seconds in which further signals count as the first: `timeout` sends each one twice, and torchrun
# passes on what its processes get from the terminal too
ECHO = 1.0
ECHO_OF_LAUNCHER = 3.0
LAST_WORDS = 3.0  # seconds that the functions of :func:`last_words` have, together

requested = stop.requested
defer = stop.defer


class Terminated(SystemExit):
    """A signal other than SIGINT asked to stop where no training polls."""

    def __init__(self, number: int) -> None:
        super().__init__(exit_code(number))
        self.signal = number


class Interrupted(KeyboardInterrupt):
    """Ctrl-C was pressed, and a message about what it ended has been printed."""


class _State:
    """What this process knows of signals."""

    number = 0  # of the first one; 0 before
    came_at = 0.0  # by time.monotonic()
    timeout = 30.0  # seconds from then on until the process is ended as it is
    listens = False
    raised = False
    raises_no_interrupt = False  # as in a local rank
    last: tuple[Callable[[int, str], object], ...] = ()


def exit_code(number: int) -> int:
    """Return the exit code of a process that a signal has ended; SIGUSR1 counts as SIGTERM."""
    return 128 + (signal.SIGTERM if number == signal.SIGUSR1 else number)


def reason(number: int) -> str:
    """Return why a process ends that a signal has reached."""
    if number == signal.SIGINT:
        return "interrupted by the user"
    return f"terminated by {signal.Signals(number).name}"


def listen() -> None:
    """Handle the signals from now on; one that is ignored (``nohup``) remains ignored."""
    if _State.listens or threading.current_thread() is not threading.main_thread():
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    _State.listens = True
    threading.Thread(target=_watch, args=(heard,), daemon=True, name="signals").start()
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    for number in ASKING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)


def handled() -> list[int]:
    """Return the signals that :func:`listen` handles in this process."""
    return [number for number in ASKING if signal.getsignal(number) is _handle]


def ignore() -> None:
    """Ignore the signals from now on."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)


def answered_otherwise() -> None:
    """Note that this process answers signals by handlers that raise no KeyboardInterrupt."""
    _State.raises_no_interrupt = True


def may_have_raised() -> bool:
    """Return whether Ctrl-C may be the reason of a KeyboardInterrupt, and not a user's code."""
    if _State.raises_no_interrupt:
        return False
    return _State.raised or not _State.listens


def set_timeout(seconds: float) -> None:
    """Set after how many seconds from the first signal the process is ended as it is."""
    _State.timeout = seconds


def time_left() -> float:
    """Return the seconds until this process is ended as it is; infinite before a signal."""
    if not _State.number:
        return math.inf
    return _State.came_at + _State.timeout - time.monotonic()


@contextmanager
def last_words(function: Callable[[int, str], object]) -> Iterator[None]:
    """Call ``function`` with code and reason, in a thread, if the process ends in this block."""
    _State.last = (function, *_State.last)
    try:
        yield
    finally:
        _State.last = _State.last[1:]


def requeue() -> None:
    """Let Slurm start this job again if SIGUSR1 stopped it, or Slurm pre-empts it.

    Slurm takes a job that ends by itself within its grace time for one that failed. The first rank
    asks.
    """
    job = slurm_job()
    first = (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0"
    if not job or not first or _State.number not in (signal.SIGUSR1, signal.SIGTERM):
        return
    if _State.number == signal.SIGTERM and not _is_preempted(job):
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"clip-runner: Slurm does not start the job again: {error}", file=sys.stderr)


def _is_preempted(job: str) -> bool:
    """Return whether Slurm pre-empts a job that runs; one that a user cancels no longer does."""
    command = ["scontrol", "--oneliner", "show", "job", job]
    try:
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return False
    fields = dict(re.findall(r"(\w+)=(\S+)", said.stdout))
    preempted = fields.get("PreemptTime", "None")
    started = fields.get("StartTime", "None")
    # The time of an earlier pre-emption may remain; times in ISO 8601 are ordered as text.
    return fields.get("JobState") == "RUNNING" and preempted != "None" and preempted >= started


@contextmanager
def deferred() -> Iterator[None]:
    """Note a signal in this block, and raise what it asks for at the end of the block.

    An exception in the midst of a library's code may be lost, or be taken for something else:
    pydantic calls a value invalid, an import leaves half a module, and torch's C++ aborts.
    """
    nested = stop.is_deferred()
    stop.defer()
    try:
        yield
    finally:
        if not nested:
            raise_noted()


def raise_noted() -> None:
    """End the time in which signals are noted only, and raise what one of them asks for."""
    number = stop.reset()
    if number:
        _State.raised = True
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


def raise_if_noted() -> None:
    """Raise what a signal asks for that was noted, if there is one."""
    if stop.requested():
        raise_noted()


def _handle(number: int, frame: FrameType | None) -> None:
    stop.request(number)
    if not stop.is_deferred() and not _State.raised:
        _State.raised = True
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


def _watch(heard: int) -> None:
    while True:
        ready, _, _ = select.select([heard], [], [], 0.2 if _State.number else None)
        numbers = os.read(heard, 256) if ready else b""
        for number in numbers:
            if number in ASKING:
                _note(number)
        if time_left() < 0:
            _end(f"it had not ended after {_State.timeout:g} s")


def _note(number: int) -> None:
    """Note the first signal; end the process at a second one that is no echo of the first."""
    seconds = time.monotonic()
    echo = ECHO if started_rank() is None else ECHO_OF_LAUNCHER
    if not _State.number:
        _State.came_at = seconds
        _State.number = number
    elif seconds - _State.came_at > echo:
        _end("a second signal")


def _end(cause: str) -> None:
    """End the process as it is, after the functions of :func:`last_words`."""
    code = exit_code(_State.number)
    why = f"{reason(_State.number)}; {cause}"

    def speak() -> None:
        for function in _State.last:
            with suppress(Exception):
                function(code, why)
        with suppress(OSError):
            os.write(2, f"clip-runner: {why}\n".encode())
        requeue()

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    speaker.join(LAST_WORDS)
    os._exit(code)


def _leave_to_parent() -> None:
    """Let a forked process, such as a loader's worker, be ended by its parent alone."""
    if _State.listens:
        signal.set_wakeup_fd(-1)
        for number in handled():
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)


os.register_at_fork(after_in_child=_leave_to_parent)
