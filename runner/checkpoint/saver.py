"""Save checkpoints while a training runs, and keep the newest and the best of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from runner.checkpoint import content, folder
from runner.checkpoint.content import Training, Writing
from runner.config.duration import MINUTES, Duration
from runner.config.notation import higher_is_better
from runner.parallel.collectives import is_first, on_first, several_ranks
from runner.run_folder import keys


class CheckpointSaver:
    """Saves a training at intervals: a callback of :class:`runner.Trainer`.

    A checkpoint is a folder ``step_<number>`` that holds everything to continue with the same
    steps. It gets its name when it is complete, so an interrupted write leaves the one before it.

    Args:
        folder: folder of all checkpoints of the run, on a disk that all ranks share.
        interval: duration between checkpoints, such as ``500ba`` or ``10min``; None: only when the
            training is asked to stop.
        keep: number of newest checkpoints to keep; 0: none is saved.
        best: metric by which a further checkpoint is kept, such as ``eval/loss``: the one whose
            last evaluation is the best. None: none is.
        maximizes: whether a higher value of ``best`` is better; by default it is of an accuracy.
        save_final: whether to save the weights of the end in ``final``.
        asynchronous: whether training goes on while files are written, which takes host memory for
            a copy; by default on accelerators.
        about: what each manifest says besides step, metrics and world size: a JSON-like dict.

    Example:
        >>> saver = CheckpointSaver("checkpoints", "100ba", best="eval/loss")
        >>> trainer = Trainer(model, loader, "10ep", eval_dataloader=held_out, callbacks=[saver])
        >>> trainer.load("checkpoints/step_000000300")  # in a later process
        >>> trainer.fit()
    """

    def __init__(
        self,
        folder: Path | str,
        interval: str | Duration | None = "10min",
        *,
        keep: int = 2,
        best: str | None = None,
        maximizes: bool | None = None,
        save_final: bool = True,
        asynchronous: bool | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.interval = Duration.parse_interval(interval) if isinstance(interval, str) else interval
        self.keep, self.best, self.save_final = keep, best, save_final
        self._maximizes = higher_is_better(best or "") if maximizes is None else maximizes
        self._asynchronous = asynchronous
        self._about = dict(about or {})
        self._writing: Writing | None = None
        self._group: dist.ProcessGroup | None = None
        self._saved = time.monotonic()

    @property
    def duration(self) -> Duration | None:
        """The interval, if it is counted in steps, samples, tokens or epochs."""
        counted = self.interval is not None and self.interval.unit != MINUTES
        return self.interval if counted and self.keep else None

    def begin(self, training: Training, step: int) -> None:
        """Check before the first step that checkpoints can be saved; every rank has to call this.

        Raises:
            ValueError: the folder holds checkpoints of another training, which would be removed;
                or the state of the training cannot be saved.
        """
        if not self.keep:
            return
        newest = None if step else on_first(lambda: next(folder.whole(self.folder), None))
        if newest is not None:
            raise ValueError(
                f"{self.folder} holds {newest[0].name} of an earlier training, which this one "
                "would remove: load it to continue, or choose another folder"
            )
        content.require_savable(training)

    def due(self) -> bool:
        """Return whether this rank asks for a checkpoint: the first one by its clock, and any rank
        that knows that the last one could not be written, which :meth:`save` then raises.
        """
        return (is_first() and self.overdue()) or (
            self._writing is not None and self._writing.failed()
        )

    def overdue(self) -> bool:
        """Return whether the minutes of the interval have passed, by the clock of this rank."""
        if self.interval is None or self.interval.unit != MINUTES or not self.keep:
            return False
        return time.monotonic() - self._saved >= 60 * self.interval.value

    def save(self, training: Training, step: int, metrics: Mapping[str, Any]) -> None:
        """Save a checkpoint between two steps; every rank has to call this.

        ``metrics`` are the last values; those of evaluations and ``best`` are recorded. An OSError,
        of this checkpoint or the one before, is raised on every rank.
        """
        self.wait()
        if not self.keep:
            return
        about = self._described(training, metrics)
        on_cpu = training.device.type == "cpu"
        if on_cpu if self._asynchronous is None else not self._asynchronous:
            content.save(training, self.folder, step, about)
            if is_first():
                self._prune(step)
        else:
            if self._group is None and several_ranks():
                # Its collectives run in a thread beside those of the training.
                self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
            self._writing = Writing(
                training, self.folder, step, about, self._group, lambda: self._prune(step)
            )
        self._saved = time.monotonic()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; every rank has to call this."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()

    def finish(self, training: Training, step: int, metrics: Mapping[str, Any]) -> None:
        """Complete the last checkpoint, and save the final weights; every rank has to call this."""
        self.wait()
        if self.save_final:
            about = {"step": step, **self._described(training, metrics)}
            content.save_weights(training, self.folder, about)

    def _described(self, training: Training, metrics: Mapping[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in metrics.items() if k.startswith(keys.EVAL) or k == self.best}
        return {**self._about, "metrics": kept, "world_size": training.plugin.world_size}

    def _prune(self, step: int) -> None:
        folder.prune(self.folder, self.keep, self.best, self._maximizes, newest=step)
