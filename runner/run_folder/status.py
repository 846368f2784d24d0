"""Write the files of a run folder that hold its configuration, its state and its summary."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any, Literal

import yaml

from runner.run_folder import files
from runner.run_folder.atomic import write_text
from runner.run_folder.state import now
from runner.run_folder.strict_json import write_object

PROGRESS_SECONDS = 1.0
"""Shortest time between two writes of the step to ``status.json``."""


class Record:
    """Keep ``config.yaml``, ``status.json`` and ``summary.json`` of one run folder.

    Args:
        folder: folder of the run, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._status: dict[str, Any] = {}
        self._written = -float("inf")

    def begin(self, config: dict[str, Any], config_hash: str, wandb_run_id: str | None) -> None:
        """Write the resolved configuration and the state ``running``.

        Args:
            config: resolved configuration in plain containers.
            config_hash: its hash, from :func:`runner.config.identity.config_hash`.
            wandb_run_id: id of the run in wandb; None if wandb records nothing.
        """
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
        }
        self._write_status()

    def progress(self, step: int) -> None:
        """Set the number of optimizer steps taken; the file is written at most once a second."""
        self._status["step"] = step
        if time.monotonic() - self._written >= PROGRESS_SECONDS:
            self._write_status()

    def summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``."""
        write_object(self._folder / files.SUMMARY, summary)

    def end(
        self,
        state: Literal["finished", "failed", "interrupted"],
        exit_code: int,
        error: str | None,
        rank: int | None,
    ) -> None:
        """Write how the run ended.

        Args:
            state: final state.
            exit_code: exit code of the command.
            error: error message, with its traceback if there is one.
            rank: rank that failed first.
        """
        self._status |= {
            "state": state,
            "exit_code": exit_code,
            "error": error,
            "rank": rank,
            "ended": now(),
        }
        self._write_status()

    def _write_status(self) -> None:
        write_object(self._folder / files.STATUS, self._status)
        self._written = time.monotonic()
