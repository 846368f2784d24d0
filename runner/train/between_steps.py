"""Between two steps: save a checkpoint that is due, and end a training that was asked to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner.checkpoint.content import Training
from runner.checkpoint.saver import CheckpointSaver
from runner.config.duration import Duration
from runner.config.problem import Stopped
from runner.run_folder import keys
from runner.train.asked import NOTHING, Asked
from runner.train.progress import Progress
from runner.train.state import TrainState


class BetweenSteps:
    """Saves checkpoints and stops, on all ranks together."""

    def __init__(
        self,
        state: TrainState,
        end: Duration,
        saver: CheckpointSaver | None,
        stop: Callable[[], int],
    ) -> None:
        self._state, self._end = state, end
        self._saver, self.stop = saver, stop

    def begin(self, training: Training) -> None:
        """Check before the first step that checkpoints can be saved; every rank has to call
        this.
        """
        if self._saver is not None:
            self._saver.begin(training, self._state.progress.step)

    def asks(self) -> Asked:
        """Return what this rank asks for; checkpoints are due by the clock of the first one."""
        signal, saver = self.stop(), self._saver
        if saver is None:
            return Asked(signal) if signal else NOTHING
        return Asked(signal, self._state.rank == 0 and saver.overdue(), saver.failed())

    def act(self, training: Training, asked: Asked, before: Progress) -> None:
        """Save a checkpoint if one is due after this step, and stop if a rank was asked to."""
        saver = self._saver
        if saver is None and not asked.stop:
            return
        at = self._state.progress
        stops = asked.stop != 0 and not at.reached(self._end)
        if saver is not None:
            if asked.failed:
                saver.wait()
            interval = saver.duration
            if stops or asked.save or (interval is not None and at.completed(interval, before)):
                saver.save(training, at.step, self._metrics(saver))
            if stops:
                saver.wait()
        if stops:
            self._state.meter.flush()
            raise Stopped(asked.stop)

    def finish(self, training: Training) -> None:
        """Complete the last checkpoint, and save the final weights, after the last step."""
        if self._saver is not None:
            step = self._state.progress.step
            self._saver.finish(training, step, self._metrics(self._saver))

    def _metrics(self, saver: CheckpointSaver) -> dict[str, Any]:
        """Return the metrics that a checkpoint is recorded with: evaluations, and the best's."""
        self._state.meter.flush()
        return {
            key: value
            for key, value in self._state.meter.last.items()
            if key.startswith(keys.EVAL) or key == saver.best
        }
