"""Record a run in the files that TensorBoard reads."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.run_folder import files, keys
from runner.run_folder.strict_json import Row


class TensorboardSink:
    """Records a run for ``tensorboard --logdir``, in ``folder/tensorboard``, without torch."""

    def __init__(self, folder: Path, continued_after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._summary = Summary
        self._writer: Any = EventFileWriter(str(folder / files.TENSORBOARD))
        if continued_after is not None:  # later rows of the former part are not shown
            start = SessionLog(status=SessionLog.START)
            self._add(step=continued_after + 1, session_log=start)

    def write(self, row: Row) -> None:
        """Write one event with the metrics of a row."""
        values = []
        for key, value in row.items():
            if key != keys.TRAIN_STEP:
                values.append(self._summary.Value(tag=key, simple_value=value))
        self._add(step=int(row[keys.TRAIN_STEP]), summary=self._summary(value=values))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Close the file of events."""
        with suppress(OSError):  # a full disk, which has ended the run before
            self._writer.close()

    def _add(self, **event: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), **event))
