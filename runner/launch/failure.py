"""Why a run does not finish: a signal, or a rank that failed, hangs or was killed (see README)."""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGINT
from typing import Any, Literal

from runner.config.environment import started_nodes
from runner.launch import signals
from runner.run_folder import files
from runner.run_folder.strict_json import disk_full, read_object, write_object
from runner.train import stop

PATIENCE = 3.0  # seconds in which ranks write how they ended, after one lost a connection
LATER = 5.0  # seconds by which collectives end after `launch.timeout`, when stacks are written
KNOBS = (
    "out of memory: lower data.batch_size (accumulation.steps keeps the size of the step), or "
    "shard the model over more ranks (plugin=fsdp, plugin=tensor, plugin=pipeline)"
)
# Modules that a lost connection is raised in, and those that wait in code without a frame
COLLECTIVE = ("torch.distributed.", "torch.autograd.graph")
WAITS = ("runner.clip.transfer", "runner.parallel.gradient_sync", "runner.parallel.pipeline")
_WORKER = re.compile(r"DataLoader worker \(pid.*\) (exited unexpectedly|is killed by signal)")
_OUT_OF_MEMORY = re.compile(r"out of memory|(can't|cannot) allocate memory", re.I)


@dataclass(eq=False)
class Failure(Exception):
    """Why a run did not finish; raised where a rank failed."""

    error: str
    rank: int | None = None
    node: str | None = None
    state: Literal["failed", "interrupted"] = "failed"
    exit_code: int = 1
    disk_full: bool = False


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | Failure:
    try:
        if number := stop.reset():
            raise signals.Terminated(number)
        return work()
    except BaseException as error:
        stop.requested()  # from here on a signal is noted: the record is written whole
        if number := stopped_by(error):
            reason, code = signals.reason(number), signals.exit_code(number)
            return Failure(reason, state="interrupted", exit_code=code)
        why = error if isinstance(error, Failure) else Failure(described(error), 0)
        full = disk_full(why.error) if why is error else disk_full(error)
        return replace(why, error=full or why.error, disk_full=full is not None)


def described(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error)).strip()
    out = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))
    return f"{text}\n{KNOBS}" if out or isinstance(error, MemoryError) else text


def may_be_lost_peer(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
    lost = {*modules[-1:]} & {*WAITS} or any(one.startswith(COLLECTIVE) for one in modules)
    return bool(lost) and isinstance(error, RuntimeError)


def stopped_by(error: BaseException) -> int:
    """Return the signal that ``error`` follows from; 0 for none."""
    if isinstance(error, KeyboardInterrupt):
        return SIGINT
    if isinstance(error, stop.Stopped | signals.Terminated):
        return error.signal
    return stop.requested() if _WORKER.search(str(error)) or may_be_lost_peer(error) else 0


def begin(folder: Path, rank: int, seconds: float) -> None:
    """Write that a rank runs; its stack is written if it begins no microbatch in ``seconds``."""
    if _write(file_of(folder, rank)):
        watch = (file_of(folder, rank).with_suffix(".stack"), seconds)
        threading.Thread(target=_watch, args=watch, daemon=True, name="hang").start()


def report(folder: Path, rank: int, error: BaseException) -> None:
    lost = may_be_lost_peer(error)
    if lost or not stopped_by(error):
        _write(file_of(folder, rank), error="" if lost else described(error))


def end_after_failure(folder: Path) -> None:
    """End this process, which was asked to end, soon after a rank failed."""
    while not any("error" in read_object(one) for one in (folder / files.RANKS).glob("*.json")):
        time.sleep(0.2)
    time.sleep(PATIENCE)
    os._exit(1)


def blamed(folder: Path, size: int, timeout: float) -> Failure:
    """Return the rank because of which the others lost a connection."""
    until, silent = time.monotonic() + PATIENCE, [0]
    while silent and time.monotonic() < until:
        time.sleep(0.1)
        told = [read_object(file_of(folder, rank)) for rank in range(size)]
        for rank, one in enumerate(told):
            if one.get("error"):
                return Failure(one["error"], rank, one.get("node"))
        silent = [rank for rank, one in enumerate(told) if "error" not in one]
    first = silent[0] if silent else 0
    node = told[first].get("node")
    who = f"rank {first}" + (f" on {node}" if node else "")
    error = f"{who} hangs or was killed: the others lost" if silent else "each rank lost"
    error += f" the connection, or waited for more than launch.timeout={timeout:g} s"
    return Failure("\n".join([*_stacks(folder, size), error]), first, node)


def file_of(folder: Path, rank: int) -> Path:
    return folder / files.RANKS / f"{rank}.json"


def _write(file: Path, **told: str) -> bool:
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    node = {"node": name} if (started_nodes() or 1) > 1 else {}
    with suppress(OSError):  # the folder may be that of an evaluation on another machine
        file.parent.mkdir(exist_ok=True)
        write_object(file, {**node, **told})
        return True
    return False


def _watch(file: Path, seconds: float) -> None:
    seen = 0
    with file.open("w") as stack:
        while True:
            if stop.begun != seen:
                seen = stop.begun
                faulthandler.dump_traceback_later(seconds, file=stack)  # by a thread in C
            time.sleep(min(1.0, seconds / 10))


def _stacks(folder: Path, size: int) -> list[str]:
    lines = []
    for rank in range(size):
        with suppress(OSError):
            text = file_of(folder, rank).with_suffix(".stack").read_text(encoding="utf-8")
            _, head, calls = text.rpartition("(most recent call first):\n")
            if head:
                lines += [f"where rank {rank} is {head.rstrip()}", *calls.splitlines()[:12]]
    return lines
