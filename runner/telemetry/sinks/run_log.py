"""The lines of ``runner.log`` about a run: how it was started, and how it has ended."""

from __future__ import annotations

import logging
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.masking import masked_words
from runner.run_folder.strict_json import Row
from runner.telemetry.sinks import ending

log = logging.getLogger("runner")


class RunLog:
    """Logs how a run was started, and its end."""

    def __init__(
        self, folder: Path, overrides: Sequence[str], made_with: Mapping[str, str]
    ) -> None:
        self._folder = folder
        # No environment variables, which may hold secrets
        log.info("command: %s", shlex.join(masked_words(sys.orig_argv)))
        log.info("overrides of this run: %s", shlex.join(overrides) or "none")
        log.info("folder: %s on %s", folder, socket.gethostname())
        for key, value in made_with.items():
            log.info("%s: %s", key, value)

    def write(self, row: Row) -> None:
        """Do nothing: rows have a file of their own."""

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Log the advice on the threshold, and how the run has ended."""
        for sentence in (summary or {}).get("guidance", ()):
            log.info("%s", sentence)
        ended = ending(exit_code)
        log.info("%s with exit code %d; results are in %s", ended, exit_code, self._folder)
