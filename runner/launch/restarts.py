"""Start the ranks of a run again after one of them failed (``launch.max_restarts``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config import disk
from runner.config.environment import OWN_STORE, restarts_may_fail
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
    """Train, and start again from the newest checkpoint after a local rank failed."""
    checkpoint = start.checkpoint
    failures: list[dict[str, Any]] = []
    while True:
        try:
            return train(checkpoint)
        except RankFailed as failed:
            if disk.told_by_rank(failed.error) is not None or not allowed:
                raise
            found = newest(folder)
            step = found.step if found.checkpoint or not start.former else start.step
            error = hide(failed.error.splitlines()[-1] if failed.error else "")
            reached = last_step(folder / files.ROWS)
            why = None
            if len(failures) >= allowed:
                why = f"not started again: launch.max_restarts={allowed} is used up"
            failures.append({"rank": failed.rank, "error": error, "reached": reached, "step": step})
            if why := _repeated(failures) or why:
                raise RankFailed(failed.rank, f"{why}\n{failed.error}") from None
            checkpoint = found.checkpoint or start.checkpoint
            cut(folder / files.ROWS, step)
            record.restarted(failures)
            log.warning(
                "rank %d failed, the run starts again from %s (%d of launch.max_restarts=%d): %s",
                failed.rank,
                checkpoint.name if checkpoint else "its first step",
                len(failures),
                allowed,
                error,
            )


def _repeated(failures: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why a run does not start again: its last failure repeats the one before."""
    if len(failures) < 2:
        return None
    before, now = failures[-2:]
    if now["error"] != before["error"] or now["reached"] > before["reached"]:
        return None
    step = now["reached"]
    return f"not started again: this error came twice, and both times after step {step}"


def elastic_warnings() -> Iterator[str]:
    """Yield a warning if torchrun may be unable to start the ranks again."""
    if restarts_may_fail():
        yield (
            "after a failure, ranks that torchrun starts again may look for addresses of the ranks "
            f"before them: set {OWN_STORE}=1 for torchrun, which needs it for --max-restarts"
        )


class Onward:
    """Passes on the rows of steps that it has not passed on before."""

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
