"""The files of a run folder that say what was asked, how it stands, and how it ended."""

from __future__ import annotations

import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from runner.run_folder import files
from runner.run_folder.atomic import write_text
from runner.run_folder.strict_json import write_object

PROGRESS_SECONDS = 1.0
"""Shortest time between two updates of the step in ``status.json``."""


class Record:
    """``config.yaml``, ``status.json`` and ``summary.json`` of one run folder.

    Args:
        folder: the run's own folder; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._status: dict[str, Any] = {}
        self._written = -float("inf")

    def begin(self, config: dict[str, Any], config_hash: str, wandb_run_id: str | None) -> None:
        """Write the resolved config, and a status that says the run is under way.

        Args:
            config: the resolved config in plain containers.
            config_hash: what :func:`runner.config.identity.config_hash` made of it.
            wandb_run_id: None where wandb records nothing.
        """
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        write_text(self._folder / files.CONFIG, text)
        self._status = {
            "state": "running",
            "exit_code": None,
            "error": None,
            "rank": None,
            "config_hash": config_hash,
            "started": _now(),
            "ended": None,
            "step": 0,
            "wandb_run_id": wandb_run_id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self._write_status()

    def progress(self, step: int) -> None:
        """Note how many optimizer steps are done; the file follows at most once a second."""
        self._status["step"] = step
        if time.monotonic() - self._written >= PROGRESS_SECONDS:
            self._write_status()

    def summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``: strict JSON, numbers that are not finite as words."""
        write_object(self._folder / files.SUMMARY, summary)

    def end(
        self,
        state: Literal["finished", "failed", "interrupted"],
        exit_code: int,
        error: str | None,
        rank: int | None,
        step: int | None,
    ) -> None:
        """Write how the run ended.

        Args:
            state: in one word.
            exit_code: of the run's command.
            error: what went wrong, with its traceback where there is one.
            rank: that failed first.
            step: steps done; None for the last that was noted.
        """
        self._status |= {
            "state": state,
            "exit_code": exit_code,
            "error": error,
            "rank": rank,
            "ended": _now(),
        }
        if step is not None:
            self._status["step"] = step
        self._write_status()

    def _write_status(self) -> None:
        write_object(self._folder / files.STATUS, self._status)
        self._written = time.monotonic()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
