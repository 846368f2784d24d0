"""Write and read the files of a run that hold its configuration, its state and its summary."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from runner.config.environment import elastic_agent, elastic_job, slurm_job
from runner.run_folder import files, keys
from runner.run_folder.atomic import write_text
from runner.run_folder.strict_json import number, read_object, write_object

log = logging.getLogger(__name__)

SLURM_JOB = "slurm_job_id"
ELASTIC_JOB = "torchelastic_run_id"
ELASTIC_AGENT = "torchelastic_agent"
RESUMED = "resumed"
"""Entry of a status: the steps at which the run was continued in its own folder."""
WANDB_STEP = "wandb_step"
"""Entry of the status of a continued run: the last step whose row wandb got before."""

PROGRESS_SECONDS = 1.0
"""Shortest time between two writes of the step to ``status.json``."""


class Record:
    """Keep ``config.yaml``, ``status.json`` and ``summary.json`` of one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._status: dict[str, Any] = {}
        self._written = -float("inf")
        self._before = 0.0

    def begin(
        self,
        config: dict[str, Any],
        config_hash: str,
        wandb_run_id: str | None,
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the configuration and the state ``running``."""
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        write_text(self._folder / files.CONFIG, text)
        self._status = {
            "state": "running",
            "exit_code": None,
            "error": None,
            "rank": None,
            "config_hash": config_hash,
            "started": now(),
            "ended": None,
            "step": 0,
            "wandb_run_id": wandb_run_id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            keys.WALL_SECONDS: 0.0,
        }
        if job := slurm_job():
            self._status[SLURM_JOB] = job
        if job := elastic_job():
            self._status |= {ELASTIC_JOB: job, ELASTIC_AGENT: elastic_agent()}
        self._status |= resumed or {}
        self._before = self._status[keys.WALL_SECONDS] - time.monotonic()
        self._write_status()

    def progress(self, step: int) -> None:
        """Set the number of optimizer steps taken; the file is written at most once a second."""
        self._status["step"] = step
        if time.monotonic() - self._written >= PROGRESS_SECONDS:
            with suppress(OSError):
                self._write_status()
            self._written = time.monotonic()

    def summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``; the status too says why a training ended early."""
        if reason := summary.get(keys.ENDED_EARLY):
            self._status[keys.ENDED_EARLY] = reason
        write_object(self._folder / files.SUMMARY, summary)

    def end(
        self,
        state: Literal["finished", "failed", "interrupted"],
        exit_code: int,
        error: str | None,
        rank: int | None,
        node: str | None = None,
    ) -> None:
        """Write how the run ended; on a full disk the error is logged."""
        if node is not None:
            self._status["node"] = node
        self._status |= {
            "state": state,
            "exit_code": exit_code,
            "error": error,
            "rank": rank,
            "ended": now(),
        }
        try:
            self._write_status()
        except OSError as failed:
            log.error("%s", failed.args[-1])

    def _write_status(self) -> None:
        self._status[keys.WALL_SECONDS] = round(self._before + time.monotonic(), 3)
        write_object(self._folder / files.STATUS, self._status)
        self._written = time.monotonic()


def now() -> str:
    """Return the current time as records store it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def elapsed(status: Mapping[str, Any]) -> float | None:
    """Return the seconds between start and end of a run; None if one of them is not recorded."""
    if status.get(RESUMED):
        return number(status.get(keys.WALL_SECONDS))
    began, ended = (_moment(status.get(key)) for key in ("started", "ended"))
    return (ended - began).total_seconds() if began and ended else None


def state_of(status: Mapping[str, Any]) -> str:
    """Return the recorded state of a run, or ``unknown``."""
    state = str(status.get("state") or "unknown")
    pid, host = status.get("pid"), status.get("host")
    here = isinstance(pid, int) and pid > 0 and host in (None, socket.gethostname())
    return "killed" if state == "running" and here and not is_alive(int(pid or 0)) else state


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder holds the record of a run that did not come to its end."""
    state = read_object(folder / files.STATUS).get("state")
    if state is None:
        return any((folder / files.CHECKPOINTS).glob("step_*"))
    if state == "finished":
        return not read_object(folder / files.SUMMARY)
    return state in ("running", "failed", "interrupted")


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


def objective_of(summary: Mapping[str, Any], key: str) -> float | None:
    """Return the metric ``key`` of a run's summary, or None if the run did not record it."""
    for part in (summary.get("best"), summary.get("final"), summary):
        value = number(part.get(key)) if isinstance(part, Mapping) else None
        if value is not None:
            return value
    return None


def _moment(value: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    # Times without a zone cannot be subtracted from times with one.
    return moment.replace(tzinfo=UTC) if moment and moment.tzinfo is None else moment
