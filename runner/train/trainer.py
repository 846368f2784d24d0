"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from runner.booster import Booster, LossScale, ModelWrapper, OptimizerWrapper, Plugin, SinglePlugin
from runner.booster.criterion import Criterion
from runner.booster.loss import WindowLoss
from runner.booster.nonfinite import Nonfinite
from runner.checkpoint import content as checkpoint
from runner.checkpoint.saver import CheckpointSaver
from runner.clip import SkipRule
from runner.config.duration import Duration
from runner.config.in_backward import not_measured
from runner.config.problem import or_list
from runner.run_folder import keys
from runner.telemetry.gauges import Gauges
from runner.telemetry.meter import Meter
from runner.telemetry.options import Measurements
from runner.telemetry.sinks.sink import Sink
from runner.telemetry.statistics import Statistics
from runner.telemetry.step import StepMetrics
from runner.train.bad_gradients import MAX_SKIPS, BadGradients
from runner.train.between_steps import BetweenSteps
from runner.train.callbacks import Callbacks
from runner.train.counting import count
from runner.train.defaults import (
    Algorithms,
    duration_of,
    mode_of,
    sgd,
    warn_of_batch_norm,
    warn_of_kept_gradients,
)
from runner.train.eval_metrics import EvalMetrics
from runner.train.microbatch_norms import MicrobatchNorms
from runner.train.passes import Passes
from runner.train.probe import Probe
from runner.train.state import TrainState
from runner.train.stop import requested
from runner.train.windows import Window, Windows


class Trainer:
    """Trains a model with gradient clipping and accumulation, and records what clipping did.

    Args:
        model: the network. With a method ``loss(outputs, batch)`` it is called with whole batches;
            otherwise with a batch's inputs, and ``criterion`` compares outputs and targets.
        train_dataloader: yields microbatches: pairs (inputs, targets), longer tuples, dictionaries
            or dataclasses, see :mod:`runner.booster.batch`; anything that holds a tensor
            [samples, ...] where the model has a ``loss``.
        max_duration: ``3ep``, ``500ba`` (optimizer steps), ``100000sp``, ``1000000tok``.
        algorithms: :class:`runner.GradientClipping`, or clipping modes; one at most.
        eval_dataloader: the same of held-out samples, or None.
        optimizers: the optimizer, or several that step together, each over its own parameters; SGD
            with a learning rate of 0.1 by default. ``train/lr`` is the rate of the first one.
        schedulers: one or several; stepped once after each optimizer step that was taken.
        criterion: loss of (outputs, targets); mean cross entropy by default. The mean is taken over
            the items of all microbatches and ranks (class weights count), see
            :class:`runner.booster.loss.WindowLoss`. ``reduction="sum"`` is not divided. The
            trainable parameters of a module are synchronised and clipped with those of the model.
        plugin: how the model is spread over ranks.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        accumulation_steps: microbatches of one optimizer step.
        eval_metrics: further metrics of evaluations, see :mod:`runner.train.eval_metrics`:
            ``["f1"]``, or mappings with a ``_target_``.
        eval_interval: a duration between evaluations; there is always one at the end.
        nonfinite: what to do with a step whose gradient is not finite: skip, error or ignore.
        max_skips: number of skipped steps in a row after which the run fails; None for never. See
            :class:`runner.train.bad_gradients.BadGradients`.
        clip_in_backward: whether each gradient is clipped in the backward pass, as soon as it is
            final, see :meth:`runner.booster.OptimizerWrapper.clip_in_backward`.
        step_in_backward: whether the optimizer then steps there too, and frees each gradient.
        skip: rule that skips steps whose loss or gradient norm is a spike, see
            :class:`runner.SkipRule`. They count as skipped steps of ``max_skips``.
        loss_scale: fp16 loss scale.
        sinks: where rows go. Give them on the first rank only.
        log_interval: steps between rows.
        log_flush: steps between transfers of metrics to the host.
        what_if: thresholds for which ``clip/what_if/<λ>`` is logged: the share of the steps so far
            that each would have clipped, in the units of the clipping mode.
        per_layer: also log each parameter's gradient norm.
        measurements: what else is measured, see :class:`runner.Measurements`.
        objective: metric that runs are compared by. If it begins with ``eval/``, an evaluation that
            lacks it raises a ValueError on every rank.
        probe: number of elements of the first parameter to print after each microbatch; 0 for none.
        say: prints for ``probe``.
        device: the model, the criterion and each batch are moved there; by default the model's own.
        saver: saves checkpoints while the training runs, and the final weights.
        stop: returns the number of the signal that asked this process to stop, 0 for none. All
            ranks stop if one is asked to: after the next step, and after a checkpoint if there is a
            ``saver``.
        callbacks: objects that are called after steps, after evaluations and at the end, see
            :class:`runner.train.callbacks.Callback`; every rank has the same.

    Attributes:
        state: everything besides the weights that a run must have to continue exactly: counts,
            metrics, position in the data, clipping mode, optimizers, schedulers, random states.
        model: the boosted model.
        optimizer: the boosted optimizers.

    Raises:
        ValueError: more than one clipping algorithm, a malformed duration, or a measurement that is
            not possible.
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataloader: Iterable[Any],
        max_duration: str | Duration = "1ep",
        algorithms: Algorithms = (),
        eval_dataloader: Iterable[Any] | None = None,
        optimizers: Optimizer | Sequence[Optimizer] | None = None,
        schedulers: Any = None,
        criterion: Criterion | None = None,
        *,
        plugin: Plugin | None = None,
        precision: str = "fp32",
        accumulation_steps: int = 1,
        eval_metrics: Sequence[str | Mapping[str, Any]] = (),
        eval_interval: str | Duration = "1ep",
        nonfinite: Nonfinite = "skip",
        max_skips: int | None = MAX_SKIPS,
        clip_in_backward: bool = False,
        step_in_backward: bool = False,
        skip: SkipRule | None = None,
        loss_scale: LossScale | None = None,
        sinks: Sequence[Sink] = (),
        log_interval: int = 1,
        log_flush: int = 50,
        what_if: Sequence[float] = (),
        per_layer: bool = False,
        measurements: Measurements | None = None,
        objective: str = "",
        probe: int = 0,
        say: Callable[[str], None] = print,
        device: torch.device | str | None = None,
        saver: CheckpointSaver | None = None,
        stop: Callable[[], int] = requested,
        callbacks: Sequence[object] = (),
    ) -> None:
        if device is not None:
            model.to(device)
            if isinstance(criterion, nn.Module):
                criterion.to(device)
        self.device = next(model.parameters()).device
        self.plugin = SinglePlugin() if plugin is None else plugin
        self.train_dataloader, self.eval_dataloader = train_dataloader, eval_dataloader
        self.max_duration = duration_of(max_duration)
        self.eval_interval = duration_of(eval_interval)
        self.objective = objective
        self.saver = saver
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        warn_of_batch_norm(model, accumulation_steps)
        self.booster = Booster(precision, self.plugin, loss_scale, nonfinite, skip)
        self.criterion = criterion
        self.loss = WindowLoss(model, criterion, checked=True)
        self.model: ModelWrapper
        self.optimizer: OptimizerWrapper
        self.model, self.optimizer, *_ = self.booster.boost(
            model, optimizers or sgd(model, criterion), criterion
        )
        self.passes = Passes(
            self.booster,
            self.model,
            self.optimizer,
            self.loss,
            self.device,
            EvalMetrics(eval_metrics, self.loss),
        )
        mode = mode_of(algorithms)
        meter = Meter(sinks, log_interval, log_flush, what_if=what_if)
        meter.skipped = None if skip is None else 0
        asked = measurements or Measurements()
        meter.statistics = Statistics(asked)
        meter.layers = self._gauges = Gauges.of(
            self.optimizer.layout, mode.norm_type, per_layer, asked
        )
        if clip_in_backward:
            each = self._gauges is not None and self._gauges.reads["each"]
            for name, why in not_measured(step_in_backward).items():
                if getattr(asked, name):
                    raise ValueError(f"{name}: {why}")
            self.optimizer.clip_in_backward(mode, step=step_in_backward, each=each)
            if step_in_backward:
                warn_of_kept_gradients(accumulation_steps)
        else:
            self.optimizer.bind(mode)
        self._noise = MicrobatchNorms.of(asked, self.plugin, self.optimizer, self.passes)
        staged = self.model.pipeline is not None
        if staged and self.loss.takes_batch:
            raise ValueError("a model that computes its own loss cannot be cut into stages")
        if self.plugin.data_size > 1 or staged:
            meter.mean_over_data = self._mean_over_data
        divided = accumulation_steps > 1 or self.plugin.data_size > 1 or staged
        self.loss.checked &= divided and self.plugin.reports_metrics and self.plugin.data_rank == 0
        windows = Windows(train_dataloader, accumulation_steps)
        self.bad_gradients = BadGradients(
            self.plugin,
            self.optimizer,
            self.passes,
            windows,
            nonfinite,
            max_skips,
            self.booster.dtype,
        )
        meter.follow = self.bad_gradients.follow
        several = isinstance(schedulers, Sequence)
        self.state = TrainState(
            meter,
            mode,
            self.optimizer,
            windows,
            list(schedulers) if several else [schedulers] if schedulers else [],
            self.plugin.rank,
            self.bad_gradients,
            Callbacks(callbacks, self.plugin),
        )
        self._probe = Probe(self.model, 0 if self.plugin.rank else probe, say)
        self._between = BetweenSteps(self.state, self.max_duration, saver, stop)

    def fit(self) -> dict[str, Any]:
        """Train until ``max_duration``, from where ``state`` stands.

        Returns:
            The summary of the run: final and best metrics, percentiles of ‖G‖, the clip ratio, and
            ``ended_early``, if a callback ended it.

        Raises:
            NonFiniteGradient: a gradient is not finite and ``nonfinite`` is ``error``, or
                ``max_skips`` steps in a row were skipped.
            Stopped: a rank was asked to stop; on every rank, after the checkpoint.
            OSError: a checkpoint cannot be written, on every rank. Earlier ones are unchanged.
            ValueError: no checkpoint could be saved, see :meth:`CheckpointSaver.begin`.
            CallbackError: a callback raised an exception.
        """
        meter, callbacks = self.state.meter, self.state.callbacks
        try:
            self._between.begin(self)
            callbacks.start(self)
            self.model.train()
            started = time.perf_counter()
            for window in () if callbacks.ended else self.state.read(self.max_duration):
                self._step(window, started)
                if callbacks.ended:
                    break
                started = time.perf_counter()
            self.state.step_schedulers()
            self._between.finish(self)
            summary = meter.summary()
            if callbacks.ended:
                summary[keys.ENDED_EARLY] = callbacks.ended
            callbacks.end(self, summary)
        except BaseException:
            # What led up to the end is the most wanted part of the record; a full disk must not
            # hide what ended the run.
            with suppress(Exception):
                meter.flush(together=False)
            raise
        finally:
            if self._noise is not None:
                self._noise.stop()
        return summary

    def end_early(self, reason: str) -> None:
        """End the training after this step; for callbacks, see there.

        Args:
            reason: why, for the log and the record of the run.
        """
        self.state.callbacks.ask(reason)

    def save(self, checkpoints: Path | str, about: Mapping[str, Any] | None = None) -> Path:
        """Save a checkpoint between two steps; every rank has to call this.

        Args:
            checkpoints: folder of all checkpoints of the run, on a disk that all ranks share.
            about: what the manifest says of the checkpoint.

        Returns:
            The checkpoint, a folder named after the step.

        Raises:
            OSError: it cannot be written, on every rank. Earlier checkpoints are unchanged.

        Example:
            >>> trainer.fit()
            >>> path = trainer.save("checkpoints")
            >>> other = Trainer(same_model, same_loader, "20ep", optimizers=same_optimizer)
            >>> other.load(path)
            >>> other.fit()  # takes the steps that are left to 20 epochs
        """
        step = self.state.progress.step
        return checkpoint.save(self, Path(checkpoints), step, about or {})

    def load(self, path: Path | str, *, verify: bool = True, keep: Collection[str] = ()) -> None:
        """Continue from a checkpoint, whatever layout of ranks saved it; every rank calls this.

        Args:
            path: folder of the checkpoint.
            verify: whether to read all files first and compare their checksums with the manifest.
            keep: settings that stay those of this trainer: ``lr``, whose schedules then go on at
                the same step, other settings of the optimizers' groups, such as ``weight_decay``,
                and ``threshold``.

        Raises:
            DamagedCheckpoint: the checkpoint is not whole.
            ValueError: it is that of another model, or of other optimizers. In both cases nothing
                was loaded.
        """
        checkpoint.load(self, Path(path), verify, keep)

    def evaluate(self) -> dict[str, float]:
        """Compute loss and accuracy of the held-out data, see :meth:`Passes.evaluate`.

        Raises:
            ValueError: the objective is a metric of evaluations that this one lacks.
        """
        if self.eval_dataloader is None:
            return {}
        metrics = self.passes.evaluate(self.eval_dataloader)
        if metrics and self.objective.startswith(keys.EVAL) and self.objective not in metrics:
            raise ValueError(
                f"sweep.objective={self.objective} is not logged; there is {or_list(metrics)}"
            )
        return metrics

    def _step(self, window: Window, started: float) -> None:
        """Take one optimizer step, which began at the time ``started``."""
        state, meter, before = self.state, self.state.meter, self.state.progress
        counts = count(
            window, state.windows, self.loss, self.plugin, before.step == 0, self._between.asks()
        )
        if self.optimizer.steps_in_backward:
            state.step_schedulers()  # the backward pass steps with the rate of now
        noise = self._noise if meter.row_due(before.step + 1) else None
        if noise is not None:
            noise.begin(len(window.batches))
        loss = self.passes.accumulate(window.batches, counts.items, counts.total_items, self._show)
        total, asked = counts.sums()
        at = before.after(len(window.batches), total.samples, total.tokens, counts.last)
        evaluates = at.completed(self.eval_interval, before) or at.reached(self.max_duration)

        gauges = self._gauges if evaluates or meter.row_due(at.step) else None
        norm_type = state.mode.norm_type
        noises = None if noise is None else noise.end(counts.items, total, norm_type)
        state.step_schedulers()  # for the step before, see there
        decision = self.bad_gradients.clip(state.mode, before, window, gauges)
        if gauges is not None:
            gauges.begin(self.optimizer)
        lr = self.optimizer.optimizers[0].param_groups[0]["lr"]
        self.optimizer.step()
        decision = self.optimizer.decision or decision
        layers = None if gauges is None else gauges.end()
        state.step_taken()
        self.optimizer.zero_grad()
        self._show(len(window.batches), len(window.batches))

        state.progress = at
        seconds = time.perf_counter() - started
        counted = (at.samples, at.tokens, seconds)
        metrics = StepMetrics(at.step, loss, decision, lr, *counted, layers, noises)
        state.callbacks.step(self, metrics)
        evaluates = evaluates or state.callbacks.ended is not None
        evaluation = self.evaluate() if evaluates else None
        meter.push(metrics, evaluation)
        if decision.finite is not True:
            self.bad_gradients.check(meter)
        if evaluation:
            state.callbacks.evaluate(self, evaluation)
        self._between.act(self, asked, before)

    def _show(self, number: int, of: int) -> None:
        self._probe.show(self.state.progress.step + 1, number, of)

    def _mean_over_data(self, values: list[float]) -> list[float]:
        size = self.plugin.data_size
        return [value / size for value in self.plugin.sum_over_data(values)]
