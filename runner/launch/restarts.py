"""Start the ranks of a run again after one of them failed (``launch.max_restarts``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runner.config import disk
from runner.config.secrets import hide
from runner.launch.failure import RankFailed
from runner.launch.resume import Start, newest
from runner.run_folder import files, keys
from runner.run_folder.rows import Row, cut, last_step
from runner.run_folder.status import Record
from runner.telemetry.sinks.sink import Sink

log = logging.getLogger(__name__)


def train_again(
    train: Callable[[Path | None], dict[str, Any]],
    allowed: int,
    start: Start,
    folder: Path,
    record: Record,
) -> dict[str, Any]:
    """Train, and start again from the newest checkpoint after a local rank failed.

    A full disk ends the run, and so does a failure that repeats although the run came no further in
    between: it would come again.

    Args:
        train: trains from a checkpoint, or from the first step for None.
        allowed: number of times that the run may start again.
        start: where the training starts at first.
        folder: folder of the run.
        record: counts the restarts in ``status.json``.

    Returns:
        What ``train`` returns.

    Raises:
        RankFailed: a rank failed, and the run does not start again.
    """
    done, checkpoint, before = 0, start.checkpoint, ("", -1)
    while True:
        try:
            return train(checkpoint)
        except RankFailed as failed:
            if disk.told_by_rank(failed.error) is not None or not allowed:
                raise
            reached = last_step(folder / files.ROWS)
            error = failed.error.splitlines()[-1] if failed.error else ""
            if why := _refusal(done, allowed, (error, reached), before):
                raise RankFailed(failed.rank, f"{why}\n{failed.error}") from None
            before, done = (error, reached), done + 1
            found = newest(folder)
            checkpoint = found.checkpoint or start.checkpoint
            step = found.step if found.checkpoint or not start.former else start.step
            cut(folder / files.ROWS, step)
            record.restarted(failed.rank, hide(error), step)
            where = checkpoint.name if checkpoint else "its first step"
            message = (
                "rank %d failed, the run starts again from %s (%d of launch.max_restarts=%d): %s"
            )
            log.warning(message, failed.rank, where, done, allowed, hide(error))


def _refusal(done: int, allowed: int, now: tuple[str, int], before: tuple[str, int]) -> str | None:
    """Return why a run does not start again; None if it does.

    Args:
        done: number of restarts so far.
        allowed: number of restarts that are allowed.
        now: last line of the error, and the step that the run reached.
        before: the same of the failure before.
    """
    if done and now[0] == before[0] and now[1] <= before[1]:
        return f"not started again: this error came twice, and both times after step {now[1]}"
    return (
        f"not started again: launch.max_restarts={allowed} is used up" if done >= allowed else None
    )


class Onward:
    """Passes on the rows of steps that it has not passed on before.

    After a restart the steps since the checkpoint come again, as they were.

    Args:
        sinks: take the rows.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._last = -1

    def write(self, row: Row) -> None:
        """Pass on a row."""
        if (step := int(row[keys.TRAIN_STEP])) > self._last:
            self._last = step
            for sink in self._sinks:
                sink.write(row)

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Do nothing: the sinks are closed by whoever made them."""
