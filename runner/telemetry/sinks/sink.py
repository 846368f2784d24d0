"""The interface of everything that takes the rows of a run, and the run's log."""

from __future__ import annotations

import logging
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from runner.config.identity import masked_words
from runner.run_folder import keys
from runner.run_folder.rows import Row

log = logging.getLogger("runner")


class Sink(Protocol):
    """Takes every row of a run, in order, and then its end."""

    def write(self, row: Row) -> None:
        """Take one row, without keeping or changing the caller's dictionary."""
        ...

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Take the end of the run. Further calls have no effect."""
        ...


def ending(exit_code: int) -> str:
    """Return in one or two words how a run ended, given its exit code."""
    words = {0: "finished", 129: "hung up", 130: "interrupted", 143: "terminated"}
    return words.get(exit_code, "failed")


class RunLog:
    """Logs how a run was started, its first row, its evaluations, its last row, and its end."""

    def __init__(
        self, folder: Path, overrides: Sequence[str], made_with: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._last: Row | None = None
        # No environment variables, which may hold secrets
        log.info("command: %s", shlex.join(masked_words(sys.orig_argv)))
        log.info("overrides of this run: %s", shlex.join(overrides) or "none")
        log.info("folder: %s on %s", folder, socket.gethostname())
        for key, value in made_with.items():
            log.info("%s: %s", key, value)

    def write(self, row: Row) -> None:
        if self._last is None:
            log.info("first row: %s", _values(row))
        elif any(key.startswith(keys.EVAL) for key in row):
            log.info("evaluation: %s", _values(row, (keys.TRAIN_STEP, keys.TRAIN_LOSS, keys.EVAL)))
        self._last = row

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        if self._last is not None:
            log.info("last row: %s", _values(self._last))
        for sentence in (summary or {}).get("guidance", ()):
            log.info("%s", sentence)
        ended = ending(exit_code)
        log.info("%s with exit code %d; results are in %s", ended, exit_code, self._folder)


def _values(row: Row, wanted: tuple[str, ...] = ("",)) -> str:
    """Format metrics whose key begins with one of ``wanted``, without those of parameters."""
    left_out = (keys.LAYER_NORM, keys.LAYER_UPDATE)
    shown = (key for key in row if key.startswith(wanted) and not key.startswith(left_out))
    return "  ".join(f"{key} {row[key]:.6g}" for key in shown)
