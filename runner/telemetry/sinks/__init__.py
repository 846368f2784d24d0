"""What takes the rows of a run: the interface, the run's log, and TensorBoard's own files."""

import logging
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from runner.config.masking import masked_words
from runner.run_folder import files, keys
from runner.run_folder.strict_json import Row

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
    """Return how a run has ended, by its exit code."""
    words = {0: "finished", 129: "hung up", 130: "interrupted", 143: "terminated"}
    return words.get(exit_code, "failed")


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

    def write(self, row: Row) -> None: ...

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        for sentence in (summary or {}).get("guidance", ()):
            log.info("%s", sentence)
        ended = ending(exit_code)
        log.info("%s with exit code %d; results are in %s", ended, exit_code, self._folder)


class TensorboardSink:
    """Records a run for ``tensorboard --logdir``, in ``folder/tensorboard``, without torch."""

    def __init__(self, folder: Path, continued_after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer: Any = EventFileWriter(str(folder / files.TENSORBOARD))
        if continued_after is not None:  # later rows of the former part are not shown
            start = SessionLog(status=SessionLog.START)
            self._add(step=continued_after + 1, session_log=start)

    def write(self, row: Row) -> None:
        named = ((key, value) for key, value in row.items() if key != keys.TRAIN_STEP)
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in named]
        self._add(step=int(row[keys.TRAIN_STEP]), summary=self._summary(value=values))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        with suppress(OSError):  # a full disk, which has ended the run before
            self._writer.close()

    def _add(self, **event: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), **event))
