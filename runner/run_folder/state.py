"""Read from ``status.json`` how a run stands, and how long it took."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def now() -> str:
    """Return the current time as records store it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def elapsed(status: Mapping[str, Any]) -> float | None:
    """Return the seconds between start and end of a run; None if one of them is not recorded."""
    began, ended = (_moment(status.get(key)) for key in ("started", "ended"))
    return (ended - began).total_seconds() if began and ended else None


def state_of(status: Mapping[str, Any]) -> str:
    """Return the recorded state of a run, or ``unknown``.

    A run that is recorded as running but whose process on this machine is gone was ``killed``.
    """
    state = str(status.get("state") or "unknown")
    pid, host = status.get("pid"), status.get("host")
    here = isinstance(pid, int) and pid > 0 and host in (None, socket.gethostname())
    return "killed" if state == "running" and here and not is_alive(int(pid or 0)) else state


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    try:
        # The state follows the command name, which may itself hold blanks and parentheses.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[:1] not in (["Z"], ["X"])


def _moment(value: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    # Times without a zone cannot be subtracted from times with one.
    return moment.replace(tzinfo=UTC) if moment and moment.tzinfo is None else moment
