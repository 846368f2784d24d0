"""What takes the rows of a run: the interface, and one file a sink."""

from typing import Any, Protocol

from runner.run_folder.strict_json import Row


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
