"""Where a training stands: everything besides the weights that it must have to continue exactly."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader

from runner.booster import OptimizerWrapper, Plugin
from runner.booster.step_order import StepOrderError, StepState
from runner.clip import ClipMode
from runner.config.notation import Duration, plural
from runner.data.order import (
    OwnRandom,
    PartitionedBatches,
    RandomState,
    generators,
    set_epoch,
)
from runner.data.stream import StreamLoader
from runner.data.workers import WorkerLoader, has_persistent_workers, start_workers_anew
from runner.run_folder import keys
from runner.telemetry.meter import Meter

_logger = logging.getLogger(__name__)
T = TypeVar("T")

OTHER_SAMPLES = (
    "the stream does not yield the samples that followed when the checkpoint was saved, so the "
    "steps are not those of a run that was never stopped"
)

# What the random numbers of an epoch's order and samples are drawn from.
WITH_TRAINING = "with the training"
ALONE = "alone"

# Modules whose samplers know exactly how many samples they yield. A user's own may estimate it.
EXACT = ("torch.utils.data.sampler", "torch.utils.data.distributed")
_COUNTS = {"ep": "epoch", "ba": "step", "sp": "samples", "tok": "tokens"}  # by unit of durations


class Progress(NamedTuple):
    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    tokens: int = 0

    def after(self, batches: int, samples: int, tokens: int, end_of_epoch: bool) -> Progress:
        return Progress(
            self.epoch + end_of_epoch,
            0 if end_of_epoch else self.batch + batches,
            self.step + 1,
            self.samples + samples,
            self.tokens + tokens,
        )

    def of(self, unit: str) -> int:
        return int(getattr(self, _COUNTS[unit]))

    def reached(self, duration: Duration) -> bool:
        return self.of(duration.unit) >= duration.value

    def completed(self, interval: Duration, since: Progress) -> bool:
        unit, length = interval.unit, interval.value
        return self.of(unit) // length > since.of(unit) // length


def total_steps(duration: Duration, epoch: int | None, step: int, tokens: int | None) -> int | None:
    """Return the steps in ``duration``, given samples of an epoch and a step, tokens of a sample.

    The last step of an epoch may be short.
    """
    value, unit = duration.value, duration.unit
    if unit == "ba":
        return value
    if unit == "tok":
        if tokens is None:
            return None
        value = math.ceil(value / tokens)
    if epoch is None:
        return None if unit == "ep" else math.ceil(value / step)
    epochs, rest = (value, 0) if unit == "ep" else divmod(value, epoch)
    return epochs * math.ceil(epoch / step) + math.ceil(rest / step)


class Window(NamedTuple):
    first: int
    batches: list[Any]
    last: bool


class Windows:
    """Reads a loader in windows of so many microbatches, from any position in an epoch.

    How an epoch is continued depends on the loader. One of ``prepare_dataloader`` is set to the
    position. Another is read again up to it. If its order comes from torch's samplers, they draw
    it at the beginning of an epoch. Otherwise it could draw at any time, so it gets random numbers
    of its own, which the training does not advance.
    """

    def __init__(self, loader: Iterable[Any], steps: int) -> None:
        self.loader, self._steps = loader, steps
        order = getattr(loader, "batch_sampler", None)
        self._order = order if isinstance(order, PartitionedBatches) else None
        self._stream = loader if isinstance(loader, StreamLoader) else None
        self._generators = generators(loader)
        self._random: dict[str, RandomState] = {}
        self._position: dict[str, Any] | None = None
        self._reads = WITH_TRAINING if self._draws_at_beginning() else ALONE
        self._epoch_reads = self._reads
        self._reader: OwnRandom | None = None
        self._upcoming: list[Any] = []

    @property
    def samples(self) -> int | None:
        """Number of samples of a microbatch over all ranks; None if the loader does not tell."""
        if self._stream is not None:
            return self._stream.microbatch
        return None if self._order is None else self._order.batch_size * self._order.world_size

    @property
    def uneven(self) -> bool:
        """Whether the data may end earlier on this rank than on others, which it waits for then."""
        return self._stream is not None and self._stream.uneven

    def shares_position(self, held_out: Any) -> bool:
        """Return True if reading the held-out data would change the position of this data."""
        return self._stream is not None and self._stream.shares_position(held_out)

    def indices(self, epoch: int, microbatch: int) -> list[list[int]] | None:
        """Return the indices of the samples that each data-parallel rank reads in a microbatch."""
        if self._order is None:
            return None
        order = copy.copy(self._order)
        order.set_epoch(epoch)
        return order.parts(microbatch)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Window]:
        """Read an epoch from microbatch ``first`` on, where the state was taken.

        A loader of unknown length is read one window ahead, to know which one is the last.
        """
        steps, length = self._steps, self._length()
        for part in ("batch_sampler", "sampler", "dataset"):
            set_epoch(getattr(self.loader, part, None), epoch)
        now, upcoming = RandomState.now(self._generators), list[Any]()
        if first:
            # When an epoch begins, a sampler may draw its order, and a loader its workers' seeds.
            self._random["epoch"].restore(self._generators)
        else:
            self._random, self._epoch_reads = {"epoch": now}, self._reads
        self._reader = None
        if self._epoch_reads == ALONE:
            self._reader = OwnRandom.seeded(self._random["epoch"].digest())
        batches = self._read(lambda: self._from(first) if first else self._begin())
        if length is None:
            if first and "ahead" in self._random:
                self._random["ahead"].restore(self._generators)
            upcoming = self._next(batches)
        if first and self._reads_others(upcoming):
            # The state of the stream lacks something: random numbers of a map of many rows, say.
            batches = self._read_again(first)
            upcoming = self._next(batches)
            if self._reads_others(upcoming):
                _logger.warning(OTHER_SAMPLES)
        if first:
            now.restore(self._generators)
        for at in range(first, length or 0, steps):
            yield Window(at, self._next(batches), last=at + steps >= (length or 0))
        while length is None and (upcoming or self.uneven):
            if self._reader is None:
                self._random["ahead"] = RandomState.now(self._generators)
            window, upcoming = upcoming, self._next(batches)
            self._upcoming = upcoming
            end = first + len(window)
            if self._stream is not None:
                self._position = self._stream.position(end)
                if self._stream.uneven:
                    missing = range(end, first + steps)
                    window = [*window, *map(self._stream.stand_in, missing)]
                    end = first + steps
            yield Window(first, window, last=not upcoming)
            first = end

    def _reads_others(self, upcoming: list[Any]) -> bool:
        """Return True if these are not the batches that followed when the state was saved."""
        saved = (self._position or {}).get("next")
        if saved is None or self._stream is None or not upcoming:
            return False
        mark = self._stream.mark_of(upcoming[0])
        return bool(saved["part"] == mark["part"] and saved["checksum"] != mark["checksum"])

    def _read_again(self, first: int) -> Iterator[Any]:
        """Read the stream again up to a microbatch, without its state."""
        assert self._stream is not None
        assert self._position is not None
        self._random["ahead"].restore(self._generators)
        self._stream.set_start(first, self._position, read_again=True)
        return self._begin()

    def _next(self, batches: Iterator[Any]) -> list[Any]:
        return self._read(lambda: list(islice(batches, self._steps)))

    def _read(self, work: Callable[[], T]) -> T:
        return work() if self._reader is None else self._reader.during(work)

    def _begin(self) -> Iterator[Any]:
        start_workers_anew(self.loader)
        return iter(self.loader)

    def _from(self, first: int) -> Iterator[Any]:
        """Begin an epoch at a microbatch; a loader without an order of ours reads those before."""
        if self._order is not None:
            self._order.set_start(first)
        elif self._stream is not None:
            assert self._position is not None
            self._stream.set_start(first, self._position)
        batches = self._begin()
        if self._order is None and self._stream is None:
            next(islice(batches, first, first), None)
        return batches

    def state_dict(self) -> dict[str, Any]:
        states = {**self._random, "now": RandomState.now(self._generators)}
        saved: dict[str, Any] = {name: state.state_dict() for name, state in states.items()}
        saved["reads"] = self._epoch_reads
        if self._stream is not None and self._position is not None:
            following = [self._stream.mark_of(batch) for batch in self._upcoming[:1]]
            saved["stream"] = {**self._position, "next": following[0] if following else None}
        return saved

    def require(self, state: Mapping[str, Any], progress: Progress) -> None:
        """Check that an epoch can be continued; one that begins needs no position."""
        if progress.batch == 0:
            return
        if self._stream is not None and "stream" in state:
            self._stream.require(state["stream"], progress.epoch)
        if "reads" not in state and progress.epoch and has_persistent_workers(self.loader):
            raise ValueError(
                "the checkpoint is of an earlier version, which kept the workers of this loader "
                "from epoch to epoch: continue from the end of an epoch, or from one in the first"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the random states; :meth:`epoch` then continues where the state was taken."""
        states = dict(state)
        self._position = states.pop("stream", None)
        # Earlier versions read every loader with the random numbers of the training.
        self._epoch_reads = states.pop("reads", WITH_TRAINING)
        self._random = {name: RandomState.of(each) for name, each in states.items()}
        self._random.pop("now").restore(self._generators)

    def _draws_at_beginning(self) -> bool:
        """Return True if the order of an epoch is known when its first microbatch is read."""
        known = self._order is not None or self._stream is not None
        return known or isinstance(self.loader, list | tuple) or self._length() is not None

    def _length(self) -> int | None:
        order: Any = self._order or getattr(self.loader, "batch_sampler", None)
        if type(self.loader) not in (DataLoader, WorkerLoader):
            return None
        known = type(order) is BatchSampler and type(order.sampler).__module__ in EXACT
        return len(order) if known or self._order is not None else None


def has_no_sample(loader: Any, microbatch: int) -> bool:
    known = loader if isinstance(loader, StreamLoader) else getattr(loader, "batch_sampler", None)
    return isinstance(known, StreamLoader | PartitionedBatches) and known.weightless(microbatch)


def held_out(loader: Any, plugin: Plugin) -> Iterator[tuple[bool, Any]]:
    start_workers_anew(loader)
    batches, ended = iter(loader), object()
    for number in count():
        batch: Any = next(batches, ended)
        if isinstance(loader, StreamLoader) and loader.uneven:
            reading = plugin.sum_over_ranks([float(batch is not ended)])[0]
            if reading and batch is ended:
                batch = loader.stand_in(number)
        if batch is ended:
            return
        yield has_no_sample(loader, number), batch


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
    schedulers_behind: bool = False  # an optimizer step was made that they have not followed

    def step_schedulers(self) -> None:
        if self.schedulers and self.schedulers_behind and self.optimizer.was_taken():
            for scheduler in self.schedulers:
                scheduler.step()
        self.schedulers_behind = False

    def read(self, end: Duration) -> Iterator[Window]:
        """Read windows, epoch after epoch, until ``progress`` has reached ``end``."""
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
        if self.optimizer.stage is not StepState.EMPTY:
            raise StepOrderError("the training state can be read between optimizer steps only")
        self.step_schedulers()
        return {
            "progress": self.progress._asdict(),
            "meter": self.meter.state_dict(),
            "clip": self.mode.state_dict(),
            **{name: part.state_dict() for name, part in self.parts.items()},
            **(self.optimizer.state_dict() if with_optimizers else {}),
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "microbatch": self.windows.samples,
            "random": {f"rank{self.rank}": self.windows.state_dict()},
        }

    def require(self, state: Mapping[str, Any]) -> None:
        if (given := len(state["schedulers"])) != len(self.schedulers):
            message = f"the training state is that of {plural(given, 'scheduler')}, "
            raise ValueError(f"{message}this run has {len(self.schedulers)}")
        self.windows.require(self._random_of(state), self._progress_of(state))

    def load_state_dict(self, state: Mapping[str, Any], keep: Collection[str] = ()) -> None:
        """Continue from a state that :meth:`state_dict` returned, in a run of the same setting."""
        self.require(state)
        if "optimizer" in state:  # It refuses another number before it loads one.
            self.optimizer.load_state_dict(dict(state))
        self.progress = self._progress_of(state)
        if "metrics" in keep:
            self.meter.last = {keys.TRAIN_SAMPLES: self.progress.samples}
        else:
            self.meter.load_state_dict(state["meter"])
        for name, part in self.parts.items():
            if name in state:
                part.load_state_dict(state[name])
        if "metrics" in keep and "skips" in self.parts:
            self.parts["skips"].searches = 0  # the meter does not count those of before either
        clip = state["clip"]
        if "mode" not in keep:
            self.mode.load_state_dict(_without_thresholds(clip) if "threshold" in keep else clip)
        for scheduler, each in zip(self.schedulers, state["schedulers"], strict=True):
            if "lr" in keep and "last_epoch" in each and hasattr(scheduler, "last_epoch"):
                # torch advises to step the optimizer first.
                with warnings.catch_warnings(action="ignore"):
                    for _ in range(scheduler.last_epoch, each["last_epoch"]):
                        scheduler.step()
            else:
                scheduler.load_state_dict(each)
        self.schedulers_behind = False
        self.windows.load_state_dict(self._random_of(state))
        if f"rank{self.rank}" not in state["random"]:
            torch.manual_seed(torch.initial_seed() + 1_000_003 * self.rank + self.progress.step)

    def _random_of(self, state: Mapping[str, Any]) -> Any:
        return state["random"].get(f"rank{self.rank}") or state["random"]["rank0"]

    def _progress_of(self, state: Mapping[str, Any]) -> Progress:
        progress, theirs = Progress(**state["progress"]), state["microbatch"]
        own, samples = self.windows.samples, progress.batch * (theirs or 0)
        if own == theirs or own is None or theirs is None:
            return progress
        if samples % own:
            raise ValueError(
                f"the training state ends after {samples} samples of an epoch, inside a microbatch "
                f"of {own} over all ranks: choose data.batch_size so that it has {theirs}"
            )
        return progress._replace(batch=samples // own)


def _without_thresholds(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a clipping mode, and of modes inside of it, without their thresholds."""
    return {
        key: _without_thresholds(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if key != "threshold"
    }
