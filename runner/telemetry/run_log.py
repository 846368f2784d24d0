"""Log the course of a run to ``runner.log``.

:mod:`runner.train.job` logs what a rank knows, such as its device and the layout of ranks.
Environment variables are not logged, because they may hold secrets.
"""

from __future__ import annotations

import logging
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.secrets import masked_words
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.sinks.sink import ending

log = logging.getLogger("runner")


class RunLog:
    """Logs how a run was started, its first row, its evaluations, its last row, and its end."""

    def __init__(
        self, folder: Path, overrides: Sequence[str], made_with: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._first: Row | None = None
        self._last: Row | None = None
        log.info("command: %s", shlex.join(masked_words(sys.orig_argv)))
        log.info("overrides of this run: %s", shlex.join(overrides) or "none")
        log.info("folder: %s on %s", folder, socket.gethostname())
        for key, value in made_with.items():
            log.info("%s: %s", key, value)

    def write(self, row: Row) -> None:
        """Log the first row, and each one with an evaluation."""
        if self._first is None:
            self._first = row
            log.info("first row: %s", _values(row))
        elif any(key.startswith(keys.EVAL) for key in row):
            log.info("evaluation: %s", _values(row, (keys.TRAIN_STEP, keys.TRAIN_LOSS, keys.EVAL)))
        self._last = row

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Log the last row and how the run ended."""
        if self._last is not None:
            log.info("last row: %s", _values(self._last))
        for sentence in (summary or {}).get("guidance", ()):
            log.info("%s", sentence)
        ended = ending(exit_code)
        log.info("%s with exit code %d; results are in %s", ended, exit_code, self._folder)


def _values(row: Row, wanted: tuple[str, ...] = ("",)) -> str:
    """Format metrics whose key begins with one of ``wanted``, without those of parameters."""
    shown = {key: value for key, value in row.items() if key.startswith(wanted)}
    of_parameters = (keys.LAYER_NORM, keys.LAYER_UPDATE)
    return "  ".join(
        f"{key} {value:.6g}" for key, value in shown.items() if not key.startswith(of_parameters)
    )
