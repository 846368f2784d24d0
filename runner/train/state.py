"""The state of a training: all that it needs besides the weights to continue exactly."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from runner.booster import OptimizerWrapper
from runner.booster.step_order import StepOrderError, StepState
from runner.clip import ClipMode
from runner.config.notation import Duration, plural
from runner.config.problem import or_list
from runner.data.order import LeftOut
from runner.run_folder import keys
from runner.telemetry.meter import Meter
from runner.train.progress import Progress
from runner.train.windows import Window, Windows


@dataclass
class TrainState:
    """The state of a training on one rank. :class:`~runner.Trainer` reads and writes it."""

    meter: Meter
    mode: ClipMode
    optimizer: OptimizerWrapper
    windows: Windows
    schedulers: list[Any] = field(default_factory=list)
    rank: int = 0
    parts: Mapping[str, Any] = field(default_factory=dict)  # what else has a state_dict
    progress: Progress = field(default_factory=Progress)
    microbatches_behind: int = 0  # of the last optimizer step, if schedules have still to follow it

    def step_schedulers(self) -> None:
        """Step the schedules after an optimizer step that was taken; a skipped one moves none.

        One that goes by samples is stepped once for each microbatch.
        """
        microbatches = self.microbatches_behind
        if self.schedulers and microbatches and self.optimizer.was_taken():
            for scheduler in self.schedulers:
                if not isinstance(scheduler, ReduceLROnPlateau):
                    times = microbatches if getattr(scheduler, "by_samples", False) else 1
                    for _ in range(times):
                        scheduler.step()
        self.microbatches_behind = 0

    def step_plateaus(self, evaluation: Mapping[str, float]) -> None:
        """Step the schedules that follow a metric of evaluations."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(evaluation[followed_metric(scheduler, evaluation)])

    def read(self, end: Duration) -> Iterator[Window]:
        """Read windows, epoch after epoch, until ``progress`` has reached ``end``."""
        while not self.progress.reached(end):
            empty = True
            epoch = self.progress.epoch
            for window in self.windows.epoch(epoch, self.progress.batch):
                empty = False
                yield window
                if self.progress.reached(end):
                    return
                if self.progress.epoch != epoch:
                    break  # the data of all ranks has ended
            if empty:
                raise ValueError("the training data holds no microbatch")
            if self.progress.of(end.unit) == 0:
                raise ValueError(f"this data has no tokens, so {end} never ends")

    def state_dict(self, with_optimizers: bool = True) -> dict[str, Any]:
        if self.optimizer.stage is not StepState.EMPTY:
            raise StepOrderError("the training state can be read between optimizer steps only")
        self.step_schedulers()
        left_out = self.windows.left_out
        return {
            "progress": self.progress._asdict(),
            "meter": self.meter.state_dict(),
            "clip": self.mode.state_dict(),
            **{name: part.state_dict() for name, part in self.parts.items()},
            **(self.optimizer.state_dict() if with_optimizers else {}),
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "microbatch": self.windows.samples,
            "random": {f"rank{self.rank}": self.windows.state_dict()},
            **({} if left_out is None else {"left_out": list(left_out)}),
        }

    def require(self, state: Mapping[str, Any]) -> None:
        """Check that a state belongs to this training.

        Raises:
            ValueError: it has another number of schedulers, or its epoch cannot be continued.
        """
        schedulers = len(state["schedulers"])
        if schedulers != len(self.schedulers):
            raise ValueError(
                f"the training state has {plural(schedulers, 'scheduler')}, "
                f"this run has {len(self.schedulers)}"
            )
        self.windows.require(self._random_of(state), self._progress_of(state))

    def load_state_dict(self, state: Mapping[str, Any], keep: Collection[str] = ()) -> None:
        """Continue from a state that :meth:`state_dict` returned, in a run of the same setting."""
        self.require(state)
        if "optimizer" in state:  # It refuses another number before it loads one.
            self.optimizer.load_state_dict(dict(state))
        self.progress = self._progress_of(state)
        for name, part in self.parts.items():
            if name in state:
                part.load_state_dict(state[name])
        if "metrics" in keep:
            self.meter.last = {keys.TRAIN_SAMPLES: self.progress.samples}
            if "skips" in self.parts:
                self.parts["skips"].searches = 0  # the meter begins anew too
        else:
            self.meter.load_state_dict(state["meter"])
        if "mode" not in keep:
            clip = state["clip"]
            self.mode.load_state_dict(_without_thresholds(clip) if "threshold" in keep else clip)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            if getattr(scheduler, "by_samples", False):
                saved = _in_microbatches_of(saved, state["microbatch"], self.windows.samples)
            _load_schedule(scheduler, saved, keeps_rates="lr" in keep)
        self.microbatches_behind = 0
        left_out = state.get("left_out")
        self.windows.left_out = None if left_out is None else LeftOut(*left_out)
        self.windows.load_state_dict(self._random_of(state))
        if f"rank{self.rank}" not in state["random"]:
            torch.manual_seed(torch.initial_seed() + 1_000_003 * self.rank + self.progress.step)

    def _random_of(self, state: Mapping[str, Any]) -> Any:
        return state["random"].get(f"rank{self.rank}") or state["random"]["rank0"]

    def _progress_of(self, state: Mapping[str, Any]) -> Progress:
        """Return the progress in microbatches of this run, which may be of another size."""
        progress = Progress(**state["progress"])
        saved_size = state["microbatch"]
        size = self.windows.samples
        if size == saved_size or size is None or saved_size is None:
            return progress
        samples = progress.batch * saved_size
        if samples % size:
            raise ValueError(
                f"the training state ends after {samples} samples of an epoch, inside a microbatch "
                f"of {size} over all ranks: choose data.batch_size so that it has {saved_size}"
            )
        return progress._replace(batch=samples // size)


def all_schedulers(schedulers: Any, held_out: Iterable[Any] | None) -> list[Any]:
    """Return the schedules of a training as a list.

    Args:
        schedulers: None, a schedule, or several, of which some may be None.
        held_out: the held-out data; None if there is none.

    Raises:
        ValueError: a schedule follows evaluations, and there is no held-out data.
    """
    candidates = schedulers if isinstance(schedulers, Sequence) else [schedulers]
    existing = [scheduler for scheduler in candidates if scheduler is not None]
    follows = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in existing)
    if follows and held_out is None:
        raise ValueError("ReduceLROnPlateau follows evaluations: give an eval_dataloader")
    return existing


def followed_metric(scheduler: ReduceLROnPlateau, evaluated: Collection[str]) -> str:
    """Return the metric of evaluations that a schedule follows.

    Args:
        scheduler: the schedule; one without an attribute ``metric`` follows ``eval/loss``.
        evaluated: metrics that evaluations have.

    Raises:
        ValueError: evaluations lack the metric.
    """
    metric: str = getattr(scheduler, "metric", keys.EVAL_LOSS)
    if metric not in evaluated:
        raise ValueError(
            f"the schedule follows {metric}, and evaluations have {or_list(evaluated)}"
        )
    return metric


def _load_schedule(scheduler: Any, saved: Mapping[str, Any], keeps_rates: bool) -> None:
    """Load the state of a schedule; one that keeps this run's rates goes on at the same step."""
    follows_steps = not isinstance(scheduler, ReduceLROnPlateau)
    counts = "last_epoch" in saved and hasattr(scheduler, "last_epoch")
    if keeps_rates and follows_steps and counts:
        _step_up_to(scheduler, saved["last_epoch"])
    else:
        scheduler.load_state_dict(saved)


def _in_microbatches_of(
    saved: Mapping[str, Any], size_before: int | None, size: int | None
) -> Mapping[str, Any]:
    """Return the state of a schedule that counts microbatches, which may be of another size now."""
    if not size_before or not size or size_before == size or "last_epoch" not in saved:
        return saved
    return {**saved, "last_epoch": saved["last_epoch"] * size_before // size}


def _step_up_to(scheduler: Any, epoch: int) -> None:
    """Step a schedule with this run's rates up to where another one stood."""
    with warnings.catch_warnings(action="ignore"):  # torch advises to step the optimizer first
        for _ in range(scheduler.last_epoch, epoch):
            scheduler.step()


def _without_thresholds(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a clipping mode, and of modes inside of it, without their thresholds."""
    return {
        key: _without_thresholds(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if key != "threshold"
    }
