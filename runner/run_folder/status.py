"""The folder of a run: who may write to it, its configuration, its state and its summary."""

from __future__ import annotations

import logging
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import yaml

from runner.config import disk
from runner.config.environment import elastic_agent, elastic_job, slurm_job
from runner.config.problem import Problem, RequestError
from runner.run_folder import files, keys
from runner.run_folder.strict_json import number, read_object, write_object, write_text

log = logging.getLogger(__name__)

SLURM_JOB = "slurm_job_id"
ELASTIC_JOB = "torchelastic_run_id"
ELASTIC_AGENT = "torchelastic_agent"
RESUMED = "resumed"  # entry of a status: the steps at which the run was continued in its own folder
# Entry of the status of a continued run: the last step whose row wandb got before
WANDB_STEP = "wandb_step"
PROGRESS_SECONDS = 1.0  # shortest time between two writes of the step to `status.json`
# Seconds to wait for the lock of a process that is gone: its children hold it until they end
RELEASED = 5.0
PACKAGES = ("clip-runner", "torch", "torchvision", "hydra-core", "wandb")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder of a run against other processes; it is made if there is none."""
    from filelock import FileLock, Timeout  # it imports asyncio, which readers do not need

    disk.require_room(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / files.LOCK, timeout=RELEASED):
            yield
    except Timeout:
        message = "another run is using this folder: wait for its end, or choose another folder"
        raise RequestError([Problem("hydra.run.dir", str(folder), message)]) from None


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
        self._status = {"state": "running", "exit_code": None, "error": None, "rank": None}
        self._status |= {"config_hash": config_hash, "wandb_run_id": wandb_run_id, "step": 0}
        self._status |= {"started": now(), "ended": None, keys.WALL_SECONDS: 0.0}
        self._status |= {"pid": os.getpid(), "host": socket.gethostname()}
        jobs = {SLURM_JOB: slurm_job(), ELASTIC_JOB: elastic_job(), ELASTIC_AGENT: elastic_agent()}
        self._status |= {key: job for key, job in jobs.items() if job} | dict(resumed or {})
        self._before = self._status[keys.WALL_SECONDS] - time.monotonic()
        self._write_status()

    def write(self, row: Mapping[str, Any]) -> None:
        """Take the step of a row; the file is written at most once a second."""
        self._status["step"] = int(row[keys.TRAIN_STEP])
        if time.monotonic() - self._written >= PROGRESS_SECONDS:
            with suppress(OSError):
                self._write_status()
            self._written = time.monotonic()

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Do nothing: :meth:`end` has written the status before any sink is closed."""

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
        """Write how the run ended; on a full disk that is logged."""
        ended = {"state": state, "exit_code": exit_code, "error": error, "rank": rank}
        self._status |= {**ended, "ended": now(), **({"node": node} if node else {})}
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
    """Return the seconds that a run which ended took; None for others."""
    return number(status.get(keys.WALL_SECONDS)) if status.get("ended") else None


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
        # The state follows the command name, which may itself hold blanks and parentheses.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] not in (["Z"], ["X"])


def objective_of(summary: Mapping[str, Any], key: str) -> float | None:
    """Return the metric ``key`` of a run's summary, or None if the run did not record it."""
    for part in (summary.get("best"), summary.get("final"), summary):
        value = number(part.get(key)) if isinstance(part, Mapping) else None
        if value is not None:
            return value
    return None


def provenance() -> dict[str, str]:
    """Return ``versions`` and, in a git checkout, ``git``: the commit, and whether files differ."""
    versions = [f"{name} {version(name)}" for name in PACKAGES]
    made = {"versions": ", ".join([f"python {platform.python_version()}", *versions])}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        made["git"] = done.stdout.strip()
    return made
