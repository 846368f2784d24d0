"""A checkpoint that threads write while the training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from runner.checkpoint.space import explained
from runner.parallel.collectives import is_first, on_first
from runner.parallel.sharded_files import one_error


class Pending:
    """A checkpoint whose tensors are being written."""

    def __init__(self, part: Path, written: Future[Any], complete: Callable[[], None]) -> None:
        def finish() -> None:
            with one_error():
                written.result()
            if is_first():
                complete()

        self._part = part
        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._finished = executor.submit(finish)
        executor.shutdown(wait=False)

    def failed(self) -> bool:
        """Return whether this rank knows that the checkpoint could not be written."""
        return self._finished.done() and self._finished.exception() is not None

    def wait(self) -> None:
        """Wait for the checkpoint; every rank has to call this."""
        wait([self._finished])
        with explained(self._part):
            on_first(self._finished.result)
