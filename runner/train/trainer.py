"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.booster import Booster, NonFiniteGradient
from runner.booster.criterion import Criterion
from runner.booster.loss import Loss, WindowLoss
from runner.checkpoint import content as checkpoint
from runner.checkpoint.content import CheckpointSaver
from runner.clip import Decision
from runner.config.accumulation import AccumulationSteps
from runner.config.leave_out import LeaveOut
from runner.config.notation import Duration
from runner.data.order import generators, unchanged
from runner.run_folder import keys
from runner.run_folder.strict_json import Row
from runner.telemetry.gauges import Gauges
from runner.telemetry.profile import NoProfile
from runner.telemetry.step import Numbers, StepMetrics
from runner.train.callbacks import Callbacks, SkippedSteps, first_of, without
from runner.train.counts import Asked, Counts, count
from runner.train.left_out import left_out_from
from runner.train.metrics import EvalMetrics
from runner.train.options import Algorithm, Evaluate, Log, Summary, bind
from runner.train.passes import Accumulated, Passes, warn_of_batch_norm
from runner.train.progress import Progress
from runner.train.recording import (
    Sinks,
    flushes_each_step,
    make_bar,
    make_meter,
)
from runner.train.state import TrainState, all_schedulers
from runner.train.stop import Stopped, defer, requested
from runner.train.windows import Window, Windows


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
        schedulers: one or several; stepped once after each optimizer step that was taken, one with
            a true attribute ``by_samples`` once for each of its microbatches, a
            ``ReduceLROnPlateau`` after each evaluation, by ``eval/loss`` (or its ``metric``).
        criterion: loss of (outputs, targets); mean cross entropy by default. The mean is taken over
            the items of all microbatches and ranks, see :class:`runner.booster.loss.WindowLoss`;
            a :class:`runner.Loss` states what they are.
        booster: the plugin, the precision and what happens to steps that are not finite or a spike;
            by default one process in full precision that skips steps that are not finite.
        accumulation_steps: microbatches of one optimizer step, or of the steps of each phase:
            ``{0: 1, "1000ba": 2, "4000ba": 8}``.
        log: what is recorded, and where; see :class:`runner.Log`.
        callbacks: what is called between steps, see :data:`runner.train.callbacks.HOOKS`; the
            same on every rank. At most one :class:`runner.CheckpointSaver` saves checkpoints, and
            one :class:`runner.SkippedSteps` says how many skipped steps end the run.

    Attributes:
        state: everything besides the weights that a run must have to continue exactly.
        model: the boosted model.
        optimizer: the boosted optimizers.
        leave_out: samples that are not read from where :meth:`fit` begins; None for none.
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
        accumulation_steps: int | Mapping[Any, int] | AccumulationSteps = 1,
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
        self.leave_out: LeaveOut | None = None
        if not isinstance(eval_dataloader, Evaluate):
            eval_dataloader = Evaluate(eval_dataloader)
        self.eval_dataloader = eval_dataloader.dataloader
        self.eval_interval = Duration.parse(str(eval_dataloader.interval))
        existing_schedulers = all_schedulers(schedulers, self.eval_dataloader)
        self._accumulation = AccumulationSteps.of(accumulation_steps)
        most_microbatches = self._accumulation.most
        warn_of_batch_norm(model, most_microbatches)
        self.loss = WindowLoss(model, criterion)
        optimizers = optimizers or torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizers, self.criterion)
        compares = most_microbatches > 1 or self.eval_dataloader is not None
        self.passes = Passes(
            self.booster, self.model, self.optimizer, self.loss, self.device, compares
        )
        self._metrics = EvalMetrics(eval_dataloader.metrics, self.loss)
        windows = Windows(train_dataloader, self._microbatches)
        windows.require_other_position(self.eval_dataloader)
        self.saver = first_of(CheckpointSaver, callbacks)
        self.skipped_steps = first_of(SkippedSteps, callbacks) or SkippedSteps()
        self.skipped_steps.watch(self.booster, self.optimizer, windows)
        further = without(callbacks, self.saver, self.skipped_steps)
        self.callbacks = Callbacks(further, self.plugin)
        self._log = log or Log()
        self._profile = self._log.profile or NoProfile()
        self._region = self._profile.region
        self.passes.region = self._region
        mode = bind(algorithms, self.optimizer, self._log)
        layout = self.optimizer.layout
        pipelined = self.model.pipeline is not None
        meter = make_meter(self._log, mode, layout, self.booster, most_microbatches, pipelined)
        meter.follow = self._follow
        self.state = TrainState(
            meter=meter,
            mode=mode,
            optimizer=self.optimizer,
            windows=windows,
            schedulers=existing_schedulers,
            rank=self.plugin.rank,
            parts={"skips": self.skipped_steps, "callbacks": self.callbacks, "loss": self.loss},
        )

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
        meter = self.state.meter
        sinks = self._open_sinks()
        meter.sinks = sinks.all
        try:
            summary = self._train()
        except BaseException as error:
            # What led up to the end is wanted most; a full disk must not hide what ended the run.
            with suppress(Exception):
                meter.flush(together=False)
            sinks.close_after(error)
            raise
        sinks.close(summary)
        return summary

    def _open_sinks(self) -> Sinks:
        """Open the files of ``Log.sinks``, and show a bar or lines on the terminal."""
        is_first = self.plugin.rank == 0
        bar = None
        if self._log.bar and is_first:
            if flushes_each_step(self.plugin, self.device):
                self.state.meter.flush_every = 1
            bar = make_bar(self._log, self.train_dataloader, self.max_duration, self._accumulation)
        step = self.state.progress.step
        return Sinks(self._log.sinks, opens=is_first, step=step, bar=bar)

    def _train(self) -> Summary:
        """Train up to the end, and return the summary."""
        state = self.state
        callbacks = self.callbacks
        if self.saver is not None:
            self.saver.begin(self, state.progress.step)
        callbacks.call("on_start", self)
        self.model.train()
        self._started = time.perf_counter()
        if self.leave_out is not None and state.windows.left_out is None:
            state.windows.left_out = left_out_from(
                self.leave_out, self.train_dataloader, state.progress, self._accumulation
            )
        windows = state.read(self.max_duration)
        while not callbacks.ended:
            self._profile.begin_step(state.progress.step + 1)
            with self._region("data"):
                window = next(windows, None)
            if window is None:
                break
            defer()  # from here on a signal lets the step end
            self._step(window)
            self._profile.end_step(state.progress.step)
        self._profile.close()
        state.step_schedulers()
        if self.saver is not None:
            state.meter.flush()
            self.saver.finish(self, state.progress.step, state.meter.last)
        summary = Summary(state.meter.summary())
        if self.skipped_steps.steps:
            summary[keys.SKIPPED_STEPS] = self.skipped_steps.steps
        if callbacks.ended:
            summary[keys.ENDED_EARLY] = callbacks.ended
        callbacks.call("on_end", self, summary)
        return summary

    def _microbatches(self) -> int:
        """Return the microbatches of the step that begins."""
        progress = self.state.progress
        units = {start.unit for start in self._accumulation.starts}
        if progress.step and not progress.tokens and "tok" in units:
            raise ValueError("this data has no tokens, so accumulation_steps would never change")
        return self._accumulation.at(progress.of)

    def _step(self, window: Window) -> None:
        """Take one optimizer step, and move ``state.progress`` past it."""
        state = self.state
        optimizer = self.optimizer
        before = state.progress
        self.passes.settle(window.batches)

        # Microbatches. The counts of all ranks travel while the first one is computed.
        counts = self._count(window)
        if optimizer.steps_in_backward:
            state.step_schedulers()  # the backward pass steps with the rate of now
        accumulated = self._accumulate(window, counts)
        total, requests, ends_epoch = counts.over_ranks()
        progress = before.after(len(window.batches), total.samples, total.tokens, ends_epoch)
        evaluates = progress.completed(self.eval_interval, before)
        evaluates = evaluates or progress.reached(self.max_duration)

        # Clip. An accelerator tells late whether the step before was taken.
        state.step_schedulers()
        has_row = evaluates or state.meter.row_due(progress.step)
        gauges = state.meter.layers if has_row else None
        per_layer = gauges is not None and gauges.per_layer
        dominant = state.meter.dominant
        decision = self._clip(window, accumulated, each=per_layer or dominant is not None)
        powers = None if dominant is None else dominant.of_step(optimizer.norms)
        self.skipped_steps.note(decision, before, window)  # for the report of a skipped step

        numbers: Numbers = {
            keys.LOCAL_LOSS: accumulated.loss,
            keys.TRAIN_LR: optimizer.optimizers[0].param_groups[0]["lr"],
            keys.TRAIN_SAMPLES: progress.samples,
            keys.STEP_SAMPLES: total.samples if self._accumulation.moves else None,
            keys.TRAIN_TOKENS: progress.tokens or None,
        }
        if "update" in optimizer.compared:
            numbers[keys.UPDATE_NORM] = optimizer.compared["update"]
        numbers |= accumulated.noise(counts, self.plugin.data_size, decision.norm)

        # Step
        layers = self._take_step(gauges)
        state.microbatches_behind = len(window.batches)
        self.callbacks.call("on_microbatch", self, len(window.batches), len(window.batches))

        # Record
        state.progress = progress
        decision = optimizer.decision or decision  # the step completes a limit of updates
        numbers[keys.TIME_STEP] = time.perf_counter() - self._started
        metrics = StepMetrics(
            step=progress.step,
            decision=decision,
            numbers=numbers,
            layers=layers,
            powers=powers,
            loss_weight=accumulated.weight,
        )
        with self._region("record"):
            self._record(metrics, evaluates)
        self._save_or_stop(requests, before)
        self._started = time.perf_counter()

    def _count(self, window: Window) -> Counts:
        """Count the items of a window, and start to sum them over all ranks."""
        asked = Asked(stop=self.stop(), save=self.saver is not None and self.saver.due())
        is_first = self.state.progress.step == 0
        return count(window, self.state.windows, self.loss, self.plugin, is_first, asked)

    def _accumulate(self, window: Window, counts: Counts) -> Accumulated:
        """Run the forward and backward passes of a window."""
        meter = self.state.meter
        measures_first = meter.noise is not None and meter.row_due(self.state.progress.step + 1)
        after_each = partial(self.callbacks.call, "on_microbatch", self)
        accumulated = self.passes.accumulate(window.batches, counts, measures_first, after_each)
        self.loss.confirm()
        return accumulated

    def _clip(self, window: Window, accumulated: Accumulated, each: bool) -> Decision:
        """Clip the gradients; with ``each``, the norm of each parameter is measured too."""
        state = self.state
        try:
            with self._region("clipping"):
                decision: Decision = self.optimizer.clip(state.mode, fold=True, each=each)
        except NonFiniteGradient as error:
            self.loss.raise_refusal()
            loss = float(accumulated.loss) * accumulated.weight
            raise self.skipped_steps.described(error, state.progress, window, loss) from None
        return decision

    def _take_step(self, gauges: Gauges | None) -> Tensor | None:
        """Step the optimizers, and free the gradients; return what ``gauges`` have measured."""
        measured_before = None if gauges is None else gauges.begin(self.optimizer.norms)
        with self._region("optimizer"):
            self.optimizer.step()
        layers = None if measured_before is None else measured_before()
        self.optimizer.zero_grad()
        return layers

    def _follow(self, steps: Sequence[Row]) -> None:
        """Take the numbers of steps that have left the device; every rank calls this alike."""
        if not all(math.isfinite(numbers[keys.GRAD_NORM]) for numbers in steps):
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
            ValueError: the checkpoint is damaged (DamagedCheckpoint), or belongs to another model
                or to other optimizers. Nothing was loaded then.
        """
        checkpoint.load(self, Path(path), verify, keep)
