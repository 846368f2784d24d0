"""Why a run does not finish: a signal, or a rank that failed, hangs or was killed (see README)."""

from __future__ import annotations

import faulthandler
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGINT
from typing import Any, Literal

from runner.config.environment import node_name, started_nodes
from runner.config.folders import disk_full
from runner.config.problem import Stopped
from runner.launch import signals
from runner.run_folder import files
from runner.run_folder.strict_json import read_object, write_object
from runner.train import stop

PATIENCE = 3.0  # seconds in which ranks write how they ended, after one lost a connection
# Seconds by which the limit of a collective is later than `launch.timeout`, after which a rank
# that begins no microbatch writes its stack
LATER = 5.0
KNOBS = (
    "out of memory: lower data.batch_size (accumulation.steps keeps the size of the step), or "
    "shard the model over more ranks (plugin=fsdp, plugin=tensor, plugin=pipeline)"
)
# Modules of torch that a lost connection is raised in: by a collective, or in a backward pass
COLLECTIVE = ("torch.distributed.", "torch.autograd.graph")
# Modules that wait for a collective that runs beside them, in code of torch without a frame
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
    """Return what ``work`` returns, or why it failed; a signal counts as a failure."""
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
    """Return the traceback of an error, and what to change if memory ran out."""
    text = "".join(traceback.format_exception(error)).strip()
    out = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))
    return f"{text}\n{KNOBS}" if out or isinstance(error, MemoryError) else text


def may_be_lost_peer(error: BaseException) -> bool:
    """Return whether ``error`` may be the end of a connection to another rank."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
    lost = (modules[-1:] and modules[-1] in WAITS) or any(m.startswith(COLLECTIVE) for m in modules)
    return bool(lost) and isinstance(error, RuntimeError)


def stopped_by(error: BaseException) -> int:
    """Return the number of the signal that ``error`` follows from; 0 for none."""
    if isinstance(error, KeyboardInterrupt):
        return SIGINT
    if isinstance(error, Stopped | signals.Terminated):
        return error.signal
    lost = isinstance(error, RuntimeError) and _WORKER.search(str(error))
    return stop.requested() if lost or may_be_lost_peer(error) else 0


def begin(folder: Path, rank: int, seconds: float) -> None:
    """Write that a rank runs; its stack is written if it begins no microbatch in ``seconds``."""
    with suppress(OSError):  # the folder may be that of an evaluation on another machine
        file_of(folder, rank).parent.mkdir(exist_ok=True)
        write_object(file_of(folder, rank), _node())
        watch = (file_of(folder, rank).with_suffix(".stack"), seconds)
        threading.Thread(target=_watch, args=watch, daemon=True, name="hang").start()


def report(folder: Path, rank: int, error: BaseException) -> None:
    """Write how a rank ended, but for one that was asked to stop."""
    lost = may_be_lost_peer(error)
    if stopped_by(error) and not lost:
        return
    with suppress(OSError):
        file_of(folder, rank).parent.mkdir(exist_ok=True)
        told = {**_node(), "error": "" if lost else described(error)}
        write_object(file_of(folder, rank), told)


def end_after_failure(folder: Path) -> None:
    """End this process, which was asked to end, soon after a rank failed: all wait for it."""
    while not any("error" in read_object(one) for one in (folder / files.RANKS).glob("*.json")):
        time.sleep(0.2)
    time.sleep(PATIENCE)
    os._exit(1)


def blamed(folder: Path, size: int, timeout: float) -> Failure:
    """Return the rank because of which the others lost a connection."""
    until = time.monotonic() + PATIENCE
    while True:
        told = [read_object(file_of(folder, rank)) for rank in range(size)]
        for rank, one in enumerate(told):
            if one.get("error"):
                return Failure(one["error"], rank, one.get("node"))
        silent = [rank for rank, one in enumerate(told) if "error" not in one]
        if not silent or time.monotonic() > until:
            break
        time.sleep(0.1)
    first = silent[0] if silent else 0
    node = told[first].get("node")
    who = f"rank {first}" + (f" on {node}" if node else "")
    error = "each rank lost the connection to another one"
    if silent:
        error = f"{who} hangs or was killed: the others lost the connection"
    error += f", or waited for more than launch.timeout={timeout:g} s"
    return Failure("\n".join([*_stacks(folder, size), error]), first, node)


def file_of(folder: Path, rank: int) -> Path:
    return folder / files.RANKS / f"{rank}.json"


def _node() -> dict[str, str]:
    return {"node": node_name()} if (started_nodes() or 1) > 1 else {}


def _watch(file: Path, seconds: float) -> None:
    """Let a thread in C write the stack of this process once no microbatch begins."""
    seen = 0
    with file.open("w") as stack:
        while True:
            if stop.begun != seen:
                seen = stop.begun
                faulthandler.dump_traceback_later(seconds, file=stack)
            time.sleep(min(1.0, seconds / 10))


def _stacks(folder: Path, size: int) -> list[str]:
    lines = []
    for rank in range(size):
        with suppress(OSError):
            text = file_of(folder, rank).with_suffix(".stack").read_text(encoding="utf-8")
            _, found, calls = text.rpartition("(most recent call first):\n")
            if found:
                lines.append(f"where rank {rank} is (most recent call first):")
                lines += calls.rstrip().splitlines()[:12]
    return lines
