"""What the ranks of a run tell about their end, in small files of the run's folder.

A rank that fails writes why, and one that lost a connection writes that. A rank that wrote neither
hangs or was killed; if it hangs, its stack is in a file too. No process has to be able to reach
another one for that, only the folder.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import threading
import time
from array import array
from contextlib import suppress
from pathlib import Path

from runner.config.environment import node_name, started_nodes
from runner.launch.failure import RankFailed, described, may_be_lost_peer, stopped_by
from runner.run_folder import files
from runner.run_folder.strict_json import read_object, write_object
from runner.train import beat

PATIENCE = 3.0
"""Seconds in which all ranks write how they ended, after one of them lost a connection."""

LATER = 5.0
"""Seconds by which the limit of a collective is later than ``launch.timeout``, after which a rank
that begins no microbatch writes its stack."""

_LONGEST = 12
"""Calls of a stack that are shown."""


def clear(folder: Path) -> None:
    """Remove what ranks wrote."""
    shutil.rmtree(folder / files.RANKS, ignore_errors=True)


def begin(folder: Path, rank: int, seconds: float) -> None:
    """Write that a rank runs; its stack is written if it begins no microbatch in ``seconds``."""
    place = folder / files.RANKS
    with suppress(OSError):  # the folder may be that of an evaluation on another machine
        place.mkdir(exist_ok=True)
        write_object(place / f"{rank}.json", _node())
        watch = (place / f"{rank}.stack", seconds)
        threading.Thread(target=_watch, args=watch, daemon=True, name="hang").start()


def began(folder: Path, rank: int) -> bool:
    """Return whether a rank ran before, in an attempt that failed."""
    return (folder / files.RANKS / f"{rank}.json").exists()


def report(folder: Path, rank: int, error: BaseException | str) -> None:
    """Write how a rank ended, but for one that was asked to stop."""
    if isinstance(error, BaseException):
        lost = may_be_lost_peer(error)
        if stopped_by(error) and not lost:
            return
        error = "" if lost else described(error)
    with suppress(OSError):
        write_object(folder / files.RANKS / f"{rank}.json", {**_node(), "error": error})


def follow_others(folder: Path, rank: int) -> None:
    """End this process, which was asked to end, soon after another rank failed."""
    own = f"{rank}.json"
    while True:
        written = [one for one in (folder / files.RANKS).glob("*.json") if one.name != own]
        if any("error" in read_object(one) for one in written):
            time.sleep(PATIENCE)
            os._exit(1)
        time.sleep(0.2)


def find(folder: Path, size: int, timeout: float) -> RankFailed | None:
    """Return the rank because of which others lost a connection; None if all of them lost one."""
    until = time.monotonic() + PATIENCE
    while True:
        told = [read_object(folder / files.RANKS / f"{rank}.json") for rank in range(size)]
        for rank, one in enumerate(told):
            if one.get("error"):
                return RankFailed(rank, one["error"], one.get("node"))
        silent = [rank for rank, one in enumerate(told) if "error" not in one]
        if not silent or time.monotonic() > until:
            break
        time.sleep(0.1)
    if not silent:
        return None
    node = told[silent[0]].get("node")
    where = f" on {node}" if node else ""
    more = f" (ranks {', '.join(map(str, silent))} do not answer)" if silent[1:] else ""
    error = (
        f"rank {silent[0]}{where} hangs or was killed: the others lost the connection, or waited "
        f"for more than launch.timeout={timeout:g} s{more}"
    )
    return RankFailed(silent[0], "\n".join([*_stacks(folder, size), error]), node)


def _node() -> dict[str, str]:
    return {"node": node_name()} if (started_nodes() or 1) > 1 else {}


def _watch(file: Path, seconds: float) -> None:
    """Let a thread in C write the stack of this process once no microbatch begins."""
    counts, seen = memoryview(array("q", [0])), 0
    beat.share(counts, 0)
    with file.open("w") as stack:
        while True:
            if counts[0] != seen:
                seen = counts[0]
                faulthandler.dump_traceback_later(seconds, file=stack)
            time.sleep(min(1.0, seconds / 10))


def _stacks(folder: Path, size: int) -> list[str]:
    """Return where the main thread of each rank was that wrote its stack, as lines of text."""
    lines = []
    for rank in range(size):
        with suppress(OSError):
            text = (folder / files.RANKS / f"{rank}.stack").read_text(encoding="utf-8")
            _, found, calls = text.rpartition("(most recent call first):\n")
            if found:
                lines.append(f"where rank {rank} is (most recent call first):")
                lines += calls.rstrip().splitlines()[:_LONGEST]
    return lines
