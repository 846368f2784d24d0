"""Everything besides the weights of a model that a run must have to continue exactly."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from runner.booster import OptimizerWrapper
from runner.booster.step_order import StepOrderError, StepState
from runner.clip import ClipMode
from runner.config.duration import Duration
from runner.config.notation import plural
from runner.telemetry.meter import Meter
from runner.train.progress import Progress
from runner.train.windows import Window, Windows


class Stateful(Protocol):
    """A part of the training that has a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""


@dataclass
class TrainState:
    """The state of a training on one rank. :class:`~runner.Trainer` reads and writes it."""

    meter: Meter
    mode: ClipMode
    optimizer: OptimizerWrapper
    windows: Windows
    schedulers: list[Any] = field(default_factory=list)
    rank: int = 0
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    _schedulers_behind: bool = False

    def step_taken(self) -> None:
        """Note that the optimizer was asked for a step, which the schedulers do not know yet."""
        self._schedulers_behind = True

    def step_schedulers(self) -> None:
        """Step the schedulers if the last optimizer step was taken."""
        if self.schedulers and self._schedulers_behind and self.optimizer.was_taken():
            for scheduler in self.schedulers:
                scheduler.step()
        self._schedulers_behind = False

    def read(self, end: Duration) -> Iterator[Window]:
        """Read windows of microbatches, epoch after epoch, until ``progress`` has reached
        ``end``.
        """
        while not self.progress.reached(end):
            empty, epoch = True, self.progress.epoch
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
        """Return the state between two optimizer steps, as nested dicts and lists."""
        if self.optimizer.stage is not StepState.EMPTY:
            raise StepOrderError("the training state can be read between optimizer steps only")
        self.step_schedulers()
        return {
            "progress": self.progress._asdict(),
            "meter": self.meter.state_dict(),
            "clip": self.mode.state_dict(),
            **{name: part.state_dict() for name, part in self.parts.items()},
            **(self.optimizer.state_dict() if with_optimizers else {}),
            "schedulers": [_state_of(scheduler) for scheduler in self.schedulers],
            "microbatch": self.windows.samples,
            "random": {f"rank{self.rank}": self.windows.state_dict()},
        }

    def require(self, state: Mapping[str, Any]) -> None:
        """Check a state that :meth:`load_state_dict` is given."""
        if (given := len(state["schedulers"])) != len(self.schedulers):
            raise ValueError(
                f"the training state is that of {plural(given, 'scheduler')}, this run has "
                f"{len(self.schedulers)}"
            )
        self.windows.require(self._random_of(state))
        self._progress_of(state)

    def load_state_dict(self, state: Mapping[str, Any], keep: Collection[str] = ()) -> None:
        """Continue from a state that :meth:`state_dict` returned, in a run of the same setting."""
        self.require(state)
        if "optimizer" in state:
            # It refuses another number before it loads one.
            self.optimizer.load_state_dict(dict(state))
        self.progress = self._progress_of(state)
        self.meter.load_state_dict(state["meter"])
        for name, part in self.parts.items():
            if name in state:
                part.load_state_dict(state[name])
        clip = state["clip"]
        self.mode.load_state_dict(_without_thresholds(clip) if "threshold" in keep else clip)
        for scheduler, each in zip(self.schedulers, state["schedulers"], strict=True):
            if "lr" in keep and "last_epoch" in each and hasattr(scheduler, "last_epoch"):
                _advance(scheduler, each["last_epoch"])
            else:
                scheduler.load_state_dict(each)
        self._schedulers_behind = False
        self.windows.load_state_dict(self._random_of(state))
        if f"rank{self.rank}" not in state["random"]:
            torch.manual_seed(torch.initial_seed() + 1_000_003 * self.rank + self.progress.step)

    def _random_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the random states of this rank, or those of the first one."""
        states: dict[str, Any] = state["random"]
        own = f"rank{self.rank}"
        if own not in states and "rank0" not in states:
            raise ValueError(f"the training state has no random state of {own}")
        found: dict[str, Any] = states[own if own in states else "rank0"]
        return found

    def _progress_of(self, state: Mapping[str, Any]) -> Progress:
        """Return the counts of a state, and its position in the data of this run."""
        progress = Progress(**state["progress"])
        return progress._replace(batch=self._same_sample(progress.batch, state["microbatch"]))

    def _same_sample(self, batch: int, microbatch: int | None) -> int:
        """Return the number of this run's microbatches that hold the samples of ``batch``
        others.
        """
        own = self.windows.samples
        if own == microbatch or own is None or microbatch is None:
            return batch
        if batch * microbatch % own:
            raise ValueError(
                f"the training state ends after {batch * microbatch} samples of an epoch, inside a "
                f"microbatch of {own} samples over all ranks: choose data.batch_size so that a "
                f"microbatch has {microbatch}"
            )
        return batch * microbatch // own


def _without_thresholds(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a clipping mode, and of modes inside of it, without their thresholds."""
    return {
        key: _without_thresholds(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if key != "threshold"
    }


def _state_of(scheduler: Any) -> Any:
    if not hasattr(scheduler, "state_dict"):
        raise ValueError(f"{type(scheduler).__name__} has no state_dict, so it cannot be saved")
    return scheduler.state_dict()


def _advance(scheduler: Any, steps: int) -> None:
    """Step a new scheduler until it is where one that was stepped ``steps`` times is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises to step the optimizer first
        for _ in range(scheduler.last_epoch, steps):
            scheduler.step()
