"""The interface of everything that takes the rows of a run."""

from __future__ import annotations

from typing import Any, Protocol

from runner.run_folder.rows import Row


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
