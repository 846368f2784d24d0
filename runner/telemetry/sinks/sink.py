"""Where the rows of a run go."""

from __future__ import annotations

from typing import Any, Protocol

from runner.run_folder.rows import Row


class Sink(Protocol):
    """Takes every row of a run, in order, and then its end."""

    def write(self, row: Row) -> None:
        """Take one row. The sink does not keep or change the caller's dictionary."""
        ...

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        """Take the end of the run. Further calls change nothing.

        A sink that talks to something outside this machine raises nothing here, however that
        fares: training is over and its result must not be lost to a dead server.

        Args:
            summary: the run's summary, JSON-like; None when the run did not get that far.
            exit_code: 0 finished, anything else did not.
        """
        ...
