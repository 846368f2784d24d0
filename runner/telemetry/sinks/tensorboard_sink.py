"""Write rows as TensorBoard's event files, by its own writer and without importing torch."""

from __future__ import annotations

import logging
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runner.run_folder import files, keys
from runner.run_folder.rows import Row

INSTALL = 'pip install "clip-runner[tensorboard]"'

log = logging.getLogger("runner.tensorboard")


def is_installed() -> bool:
    return find_spec("tensorboard") is not None


class TensorboardSink:
    """Records a run for ``tensorboard --logdir``, in ``folder/tensorboard``."""

    def __init__(self, folder: Path, continued_after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer: Any = EventFileWriter(str(folder / files.TENSORBOARD))
        if continued_after is not None:
            start = SessionLog(status=SessionLog.START)
            self._add(step=continued_after + 1, session_log=start)

    def write(self, row: Row) -> None:
        named = ((key, value) for key, value in row.items() if key != keys.TRAIN_STEP)
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in named]
        self._add(step=int(row[keys.TRAIN_STEP]), summary=self._summary(value=values))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        self._guarded(lambda writer: writer.close())
        self._writer = None

    def _add(self, **event: Any) -> None:
        made = self._event(wall_time=time.time(), **event)
        self._guarded(lambda writer: writer.add_event(made))

    def _guarded(self, use: Any) -> None:
        """Use the writer, unless it failed before: a full disk does not end the run."""
        try:
            if self._writer is not None:
                use(self._writer)
        except OSError as error:
            self._writer = None
            log.warning("TensorBoard's record of this run is not complete: %s", error)
