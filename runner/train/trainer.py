"""The training loop."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from signal import SIGINT
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from runner.booster import Booster, NonFiniteGradient
from runner.booster.criterion import Criterion
from runner.booster.loss import Count, Loss, WindowLoss
from runner.checkpoint import content as checkpoint
from runner.checkpoint.content import CheckpointSaver
from runner.clip import ClipMode, build
from runner.config.notation import Duration
from runner.data.order import generators, unchanged
from runner.gradients import transfer
from runner.run_folder import keys
from runner.run_folder.strict_json import cut
from runner.telemetry.gauges import Gauges
from runner.telemetry.meter import Meter
from runner.telemetry.sinks.console import TerminalSink, is_watched
from runner.telemetry.sinks.destination import To, file_of, sink_of
from runner.telemetry.step import FirstMicrobatch, StepMetrics, StepValues
from runner.train.callbacks import Callbacks, SkippedSteps
from runner.train.metrics import EvalMetrics
from runner.train.options import Algorithm, Evaluate, GradientClipping, InBackward, Log, Summary
from runner.train.passes import (
    NO_NOISE_SCALE,
    NO_UPDATE_RATIO,
    Asked,
    Passes,
    Sums,
    count,
)
from runner.train.progress import Progress, total_steps
from runner.train.state import TrainState
from runner.train.stop import Stopped, defer, requested
from runner.train.windows import Window, Windows

_logger = logging.getLogger(__name__)
T = TypeVar("T")
_LINES = 10  # of a training, where there is no terminal


class Trainer:
    """Trains a model with gradient clipping and accumulation, and records what clipping did.

    Args:
        model: the network, on the device to train on. With a method ``loss(outputs, batch)`` it is
            called with whole batches; otherwise with a batch's inputs, and ``criterion`` compares
            outputs and targets.
        train_dataloader: yields microbatches: pairs (inputs, targets), longer tuples, dictionaries
            or dataclasses, see :mod:`runner.booster.batch`.
        max_duration: ``3ep``, ``500ba`` (optimizer steps), ``100000sp``, ``1000000tok``.
        algorithms: :class:`runner.GradientClipping`, a clipping mode, or :class:`runner.InBackward`
            of one of them; one at most.
        eval_dataloader: the same as ``train_dataloader``, of held-out samples; or a
            :class:`runner.Evaluate`, which says how often and by what metrics; or None.
        optimizers: the optimizer, or several that step together, each over its own parameters; SGD
            with a learning rate of 0.1 by default. ``train/lr`` is the rate of the first one.
        schedulers: one or several; stepped once after each optimizer step that was taken, a
            ``ReduceLROnPlateau`` after each evaluation, by ``eval/loss`` (or its ``metric``).
        criterion: loss of (outputs, targets); mean cross entropy by default. The mean is taken over
            the items of all microbatches and ranks, see :class:`runner.booster.loss.WindowLoss`;
            a :class:`runner.Loss` states what they are.
        booster: the plugin, the precision and what happens to steps that are not finite or a spike;
            by default one process in full precision that skips steps that are not finite.
        accumulation_steps: microbatches of one optimizer step.
        log: what is recorded, and where; see :class:`runner.Log`.
        callbacks: what is called between steps, see :data:`runner.train.callbacks.HOOKS`; the
            same on every rank. At most one :class:`runner.CheckpointSaver` saves checkpoints, and
            one :class:`runner.SkippedSteps` says how many skipped steps end the run.

    Attributes:
        state: everything besides the weights that a run must have to continue exactly.
        model: the boosted model.
        optimizer: the boosted optimizers.
        stop: returns the number of the signal that asked this process to stop, 0 for none. If a
            rank is asked to, all of them stop after the next step, and after a checkpoint.

    Raises:
        DivisorError: (in :meth:`fit`, before the first step) the mean of the loss is over something
            else than the items, see :mod:`runner.booster.measurement`.
        ValueError: two clipping algorithms, a malformed duration, or an impossible measurement.
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataloader: Iterable[Any],
        max_duration: str | Duration = "1ep",
        algorithms: Sequence[Algorithm] | Algorithm = (),
        eval_dataloader: Iterable[Any] | Evaluate | None = None,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        schedulers: Any = None,
        criterion: Criterion | Loss | None = None,
        *,
        booster: Booster | None = None,
        accumulation_steps: int = 1,
        log: Log | None = None,
        callbacks: Sequence[object] = (),
    ) -> None:
        self.booster = Booster() if booster is None else booster
        self.plugin = self.booster.plugin
        self.criterion = criterion.criterion if isinstance(criterion, Loss) else criterion
        self.device = self.plugin.device or next(model.parameters()).device
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self.train_dataloader = train_dataloader
        self.max_duration = Duration.parse(str(max_duration))
        self.stop: Callable[[], int] = requested
        if not isinstance(eval_dataloader, Evaluate):
            eval_dataloader = Evaluate(eval_dataloader)
        follows = [s for s in _listed(schedulers) if isinstance(s, ReduceLROnPlateau)]
        if follows and eval_dataloader.dataloader is None:
            raise ValueError("ReduceLROnPlateau follows evaluations: give an eval_dataloader")
        self.eval_dataloader = eval_dataloader.dataloader
        self.eval_interval = Duration.parse(str(eval_dataloader.interval))
        if accumulation_steps > 1 and any(isinstance(m, _BatchNorm) for m in model.modules()):
            text = "batch norm sees one microbatch at a time: %d accumulated microbatches are not "
            _logger.warning(text + "the same as one batch of their size", accumulation_steps)
        self.loss = WindowLoss(model, criterion)
        optimizers = optimizers or torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizers, self.criterion)
        if self.model.pipeline is not None and self.loss.takes_batch:
            raise ValueError("a model that computes its own loss cannot be cut into stages")
        self.passes = Passes(self.booster, self.model, self.optimizer, self.loss, self.device)
        self._metrics = EvalMetrics(eval_dataloader.metrics, self.loss)
        self._weighs_batches = (
            accumulation_steps > 1
            or self.plugin.data_size > 1
            or self.eval_dataloader is not None
            or self.model.pipeline is not None
        )
        windows = Windows(train_dataloader, accumulation_steps)
        if windows.shares_position(self.eval_dataloader):
            raise ValueError(
                "the training data and the held-out data are one stream, which has one position: "
                "make it twice, or use num_workers=1"
            )
        self.saver = _only(CheckpointSaver, callbacks)
        self.skipped_steps = _only(SkippedSteps, callbacks) or SkippedSteps()
        self.skipped_steps.watch(self.booster, self.optimizer, windows)
        called = _without(callbacks, self.saver, self.skipped_steps)
        self.callbacks = Callbacks(called, self.plugin)
        self._log = log or Log()
        self._profile = self._log.profile
        self._region = _no_region if self._profile is None else self._profile.region
        self.passes.region = self._region
        self._accumulation_steps = accumulation_steps
        mode = self._bind(algorithms)
        schedulers = _listed(schedulers)
        self.state = TrainState(
            meter=self._meter(mode),
            mode=mode,
            optimizer=self.optimizer,
            windows=windows,
            schedulers=[scheduler for scheduler in schedulers if scheduler is not None],
            rank=self.plugin.rank,
            parts={"skips": self.skipped_steps, "callbacks": self.callbacks, "loss": self.loss},
        )

    def _bind(self, algorithms: Sequence[Algorithm] | Algorithm) -> ClipMode:
        """Bind the clipping algorithm to the optimizers, and return its mode."""
        if isinstance(algorithms, Algorithm):
            algorithms = [algorithms]
        if len(algorithms) > 1:
            raise ValueError(f"one clipping algorithm at most, not {len(algorithms)}")
        algorithm = algorithms[0] if algorithms else build("none")
        clipping = algorithm.algorithm if isinstance(algorithm, InBackward) else algorithm
        mode = clipping.mode() if isinstance(clipping, GradientClipping) else clipping
        if not isinstance(algorithm, InBackward):
            self.optimizer.bind(mode)
        elif algorithm.step and self._log.measurements.update_ratio:
            raise ValueError(f"update_ratio {NO_UPDATE_RATIO}")
        else:
            self.optimizer.clip_in_backward(mode, step=algorithm.step, each=self._log.per_layer)
        return mode

    def _meter(self, mode: ClipMode) -> Meter:
        log = self._log
        ranks = self.plugin.data_size
        layout = self.optimizer.layout
        meter = Meter([], log.interval, log.flush, what_if=log.what_if)
        meter.skips = self.booster.skip is not None
        meter.follow = self._follow
        if log.measurements.noise_scale:
            splits_model = layout.group is not None or ranks < self.plugin.world_size
            if splits_model or self._accumulation_steps < 2 or mode.norm_type != 2.0:
                raise ValueError(f"noise_scale {NO_NOISE_SCALE}")
            meter.noise = deque(maxlen=100)
        if log.per_layer or log.measurements.update_ratio:
            updates = log.measurements.update_ratio
            meter.layers = Gauges(layout, mode.norm_type, log.per_layer, updates)
        if ranks > 1 or self.model.pipeline is not None:
            meter.mean_over_data = self._mean_over_data
        return meter

    def _mean_over_data(self, values: list[float]) -> list[float]:
        return [total / self.plugin.data_size for total in self.plugin.sum_over_data(values)]

    def fit(self) -> Summary:
        """Train until ``max_duration``, from where ``state`` stands.

        Returns:
            The summary of the run: final and best metrics, percentiles of ‖G‖, the clip ratio, and
            ``ended_early``, if a callback ended it.

        Raises:
            NonFiniteGradient: a gradient is not finite and the booster's ``nonfinite`` is
                ``error``, or too many steps in a row were skipped.
            Stopped: a rank was asked to stop; on every rank, after the checkpoint.
            OSError: a checkpoint cannot be written, on every rank. Earlier ones are unchanged.
        """
        state = self.state
        opened = self._open_sinks()
        state.meter.sinks = [*self._given_sinks(), *opened]
        try:
            summary = self._train()
        except BaseException as error:
            # What led up to the end is wanted most; a full disk must not hide what ended the run.
            with suppress(Exception):
                state.meter.flush(together=False)
            signal = SIGINT if isinstance(error, KeyboardInterrupt) else getattr(error, "signal", 0)
            for sink in opened:
                with suppress(Exception):
                    sink.close(None, 128 + signal if signal else 1)
            raise
        for sink in opened:
            sink.close(summary, 0)
        return summary

    def _train(self) -> Summary:
        """Train up to the end, and return the summary."""
        state = self.state
        callbacks = self.callbacks
        if self.saver is not None:
            self.saver.begin(self, state.progress.step)
        callbacks.call("on_start", self)
        self.model.train()
        self._started = time.perf_counter()
        windows = state.read(self.max_duration)
        while not callbacks.ended:
            if self._profile is not None:
                self._profile.begin_step(state.progress.step + 1)
            with self._region("data"):
                window = next(windows, None)
            if window is None:
                break
            defer()  # from here on a signal lets the step end
            self._step(window)
            if self._profile is not None:
                self._profile.end_step(state.progress.step)
        if self._profile is not None:
            self._profile.close()
        state.step_schedulers()
        if self.saver is not None:
            state.meter.flush()
            self.saver.finish(self, state.progress.step, state.meter.last)
        summary = Summary(state.meter.summary())
        if callbacks.ended:
            summary[keys.ENDED_EARLY] = callbacks.ended
        callbacks.call("on_end", self, summary)
        return summary

    def _given_sinks(self) -> list[Any]:
        """Return the sinks and functions of ``Log.sinks``, which their maker closes."""
        return [sink_of(to) for to in self._destinations() if not isinstance(to, str | Path)]

    def _open_sinks(self) -> list[Any]:
        """Return what :meth:`fit` closes: files of ``Log.sinks``, and what the terminal shows."""
        if self.plugin.rank > 0:
            return []
        opened: list[Any] = []
        for to in self._destinations():
            if isinstance(to, str | Path):
                if self.state.progress.step > 0:
                    cut(file_of(to), self.state.progress.step)
                opened.append(sink_of(to))
        if self._log.bar:
            opened.append(self._terminal())
        return opened

    def _destinations(self) -> list[To]:
        sinks = self._log.sinks
        return list(sinks) if isinstance(sinks, list | tuple) else [sinks]  # type: ignore[list-item]

    def _terminal(self) -> TerminalSink:
        """Return the bar of this training, or its lines where there is no terminal."""
        if (
            is_watched(sys.stderr)
            and self.plugin.world_size == 1
            and transfer.can_read(self.device)
        ):
            self.state.meter.flush_every = 1  # where a flush is no collective
        microbatches = None
        with suppress(TypeError):  # a stream has no length
            microbatches = len(self.train_dataloader)  # type: ignore[arg-type]
        steps = None
        if self.max_duration.unit != "sp":
            steps = total_steps(self.max_duration, microbatches, self._accumulation_steps, None)
        interval = max(self._log.interval, (steps or _LINES * 100) // _LINES)
        return TerminalSink(steps, interval, "training", is_recorded=bool(self._destinations()))

    def _step(self, window: Window) -> None:
        """Take one optimizer step; ``state.progress`` then stands behind it."""
        state = self.state
        before = state.progress
        optimizer = self.optimizer
        if self._weighs_batches:
            self.passes.settle(window.batches)

        # Microbatches. The counts of all ranks travel while the first one is computed.
        items, sums = self._count(window)
        if optimizer.steps_in_backward:
            state.step_schedulers()  # the backward pass steps with the rate of now
        loss, first_square = self._run_microbatches(window, items, sums)
        if self.plugin.world_size > 1 and not self.loss.is_confirmed:
            self.loss.confirm()
        total, requests, ends_epoch = sums()
        progress = before.after(len(window.batches), total.samples, total.tokens, ends_epoch)
        evaluates = progress.completed(self.eval_interval, before)
        evaluates = evaluates or progress.reached(self.max_duration)

        # Clip
        state.step_schedulers()  # for the step before: an accelerator tells late if it was taken
        gauges = self.state.meter.layers
        if not evaluates and not self.state.meter.row_due(progress.step):
            gauges = None
        per_layer = gauges is not None and gauges.per_layer
        try:
            with self._region("clipping"):
                decision = optimizer.clip(state.mode, fold=True, each=per_layer)
        except NonFiniteGradient as error:
            self.loss.raise_refusal()
            raise self.skipped_steps.described(error, before, window, float(loss)) from None
        self.skipped_steps.note(decision, before, window)

        # Step
        measure_after = None if gauges is None else gauges.begin(optimizer.norms)
        lr = optimizer.optimizers[0].param_groups[0]["lr"]
        with self._region("optimizer"):
            optimizer.step()
        layers = None if measure_after is None else measure_after()
        measure_after = None  # it holds a copy of the weights
        state.schedulers_behind = True
        optimizer.zero_grad()
        self.callbacks.call("on_microbatch", self, len(items), len(items))

        # Record
        state.progress = progress
        metrics = StepMetrics(
            step=progress.step,
            local_loss=loss,
            decision=optimizer.decision or decision,  # the step completes a limit of updates
            lr=lr,
            samples=progress.samples,
            tokens=progress.tokens,
            seconds=time.perf_counter() - self._started,
            layers=layers,
            first=self._first_microbatch(first_square, items, total),
        )
        with self._region("record"):
            self._record(metrics, evaluates)
        self._save_or_stop(requests, before)
        self._started = time.perf_counter()

    def _count(self, window: Window) -> tuple[list[float | None], Callable[[], Sums]]:
        """Count the items of a window, and start to sum them over all ranks."""
        saves = self.saver is not None and self.saver.due()
        return count(
            window,
            self.state.windows,
            self.loss,
            self.plugin,
            first=self.state.progress.step == 0,
            asked=Asked(stop=self.stop(), save=saves),
        )

    def _run_microbatches(
        self, window: Window, items: Sequence[float | None], sums: Callable[[], Sums]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the passes of a window; return this rank's loss, and ‖G‖² of its first microbatch."""
        meter = self.state.meter
        first_square: Tensor | None = None
        measures = meter.noise is not None and meter.row_due(self.state.progress.step + 1)

        def after_each(number: int, microbatches: int) -> None:
            nonlocal first_square
            if measures and number == 1:
                first_square = self.passes.square_of_gradients()
            self.callbacks.call("on_microbatch", self, number, microbatches)

        loss = self.passes.accumulate(window.batches, items, lambda: sums()[0].items, after_each)
        return loss, first_square

    def _first_microbatch(
        self, square: Tensor | None, items: Sequence[float | None], total: Count
    ) -> FirstMicrobatch | None:
        """Return what the noise scale needs of the first microbatch, if it was measured."""
        share = (items[0] or 0.0) / (total.items or 1.0)
        if square is None or not 0 < share < 1:
            return None
        # Its gradient was weighted as a part of the mean over all ranks.
        unweighted = square / (share * self.plugin.data_size) ** 2
        return FirstMicrobatch(unweighted, share, total.samples)

    def _follow(self, steps: Sequence[tuple[int, StepValues]]) -> None:
        """Take the values of steps that have left the device; every rank calls this alike."""
        if not all(math.isfinite(values.norm) for _, values in steps):
            self.loss.raise_refusal()
        self.skipped_steps.follow(steps)

    def _record(self, metrics: StepMetrics, evaluates: bool) -> None:
        """Call the callbacks, evaluate where that is due, and keep the metrics of a step."""
        meter = self.state.meter
        self.callbacks.call("on_step", self, metrics)
        evaluation = None
        if evaluates or self.callbacks.ended is not None:
            evaluation = self.evaluate()
        meter.push(metrics, evaluation)
        self.skipped_steps.check(meter)
        if evaluation:
            self.state.step_plateaus(evaluation)
            self.callbacks.call("on_evaluate", self, dict(evaluation))

    def _save_or_stop(self, requests: Asked, before: Progress) -> None:
        progress = self.state.progress
        saver = self.saver
        stops = requests.stop != 0 and not progress.reached(self.max_duration)
        interval = None if saver is None else saver.duration
        due = interval is not None and progress.completed(interval, before)
        if stops or requests.save or due:
            self.state.meter.flush()
            if saver is not None:
                saver.save(self, progress.step, self.state.meter.last)
        if stops:
            if saver is not None:
                saver.wait()
            raise Stopped(requests.stop)

    def evaluate(self) -> dict[str, float]:
        """Return loss and metrics of the held-out data, ``{}`` if there is none; a collective.

        All random generators are left as they were: the training does not depend on how often it
        is evaluated.
        """
        loader = self.eval_dataloader
        if loader is None:
            return {}
        with unchanged(generators(loader), with_gpu=True):
            return self.passes.evaluate(loader, self._metrics)

    def loss_of(self, metrics: StepMetrics) -> float:
        """Return the loss of a step, as its row has it; a collective, and the host waits.

        ``metrics.local_loss`` is the part of this rank.
        """
        assert metrics.local_loss is not None
        local = float(metrics.local_loss)
        mean_over_data = self.state.meter.mean_over_data
        return local if mean_over_data is None else mean_over_data([local])[0]

    def end_early(self, reason: str) -> None:
        """End the training after this step, for callbacks; the log and the record say why."""
        self.callbacks.ask(reason)

    def save(self, checkpoints: Path | str, about: Mapping[str, Any] | None = None) -> Path:
        """Save a checkpoint between two steps, and return its folder; every rank calls this.

        Args:
            checkpoints: folder of all checkpoints of the run, on a disk that all ranks share.
            about: what the manifest says of the checkpoint.

        Raises:
            OSError: it cannot be written, on every rank. Earlier checkpoints are unchanged.
        """
        return checkpoint.save(self, Path(checkpoints), self.state.progress.step, about or {})

    def load(self, path: Path | str, *, verify: bool = True, keep: Collection[str] = ()) -> None:
        """Continue from a checkpoint, whatever layout of ranks saved it; every rank calls this.

        Args:
            path: folder of the checkpoint.
            verify: whether to compare the checksums of all files with the manifest first.
            keep: settings of this trainer that stay: ``lr``, whose schedules then go on at
                the same step, other settings of the optimizers' groups, such as ``weight_decay``,
                or ``groups`` for all of them, ``threshold``, ``mode`` (its history too), and
                ``metrics`` so far.

        Raises:
            ValueError: the checkpoint is not whole (DamagedCheckpoint), or that of another model or
                of other optimizers. Nothing was loaded then.
        """
        checkpoint.load(self, Path(path), verify, keep)


def _listed(schedulers: Any) -> list[Any]:
    return list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]


_NO_REGION = nullcontext()


def _no_region(part: str) -> AbstractContextManager[Any]:
    return _NO_REGION


def _only(kind: type[T], callbacks: Sequence[object]) -> T | None:
    """Return the first callback of a kind; None if there is none."""
    for callback in callbacks:
        if isinstance(callback, kind):
            return callback
    return None


def _without(callbacks: Sequence[object], *excluded: object) -> list[object]:
    numbers = {id(callback) for callback in excluded}
    return [callback for callback in callbacks if id(callback) not in numbers]
