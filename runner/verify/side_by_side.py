"""The work of one rank in a verification: both sides step by step, one mode after another."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runner.booster import NonFiniteGradient, Plugin
from runner.clip import ClipMode
from runner.config.schema import RunConfig
from runner.run_folder import keys
from runner.run_folder.rows import Row
from runner.telemetry.sinks.sink import Sink
from runner.train import build
from runner.train.trainer import Trainer
from runner.verify import naive, setting, watch
from runner.verify.comparison import (
    Compared,
    ComparedStep,
    Naive,
    SideMetrics,
    disagreements,
    presence,
    relative,
    tensor_errors,
)
from runner.verify.reference import BatchSplit, Reference
from runner.verify.result import outcome, row_of

BINDS = 0.1
"""Ratio of a derived threshold to the largest value of the first step that is compared with it."""


def execute(
    config: RunConfig,
    sinks: Sequence[Sink],
    make_plugin: Callable[[RunConfig], Plugin] = build.make_plugin,
) -> dict[str, Any]:
    """Compare the plugin with one process in each mode of ``verify.modes``.

    Args:
        config: the whole configuration.
        sinks: sinks for a row per compared step (see :func:`runner.verify.result.row_of`), closed
            at the end; empty except on the first rank.
        make_plugin: makes the plugin, once for each mode.

    Returns:
        The part of ``verify.json`` about the comparison on the first rank, {} on the others.

    Raises:
        runner.booster.NonFiniteGradient: a gradient is not finite.
        runner.clip.shard.LayoutError: the plugin's layout does not account for the model.
    """
    device = build.device_of(config.device)
    try:
        with _quiet():
            return _execute(config, sinks, make_plugin, device)
    except NonFiniteGradient as error:
        error.advice = ""  # clip.nonfinite=skip does not help here
        error.add_note(
            "a verification compares every step and leaves none out, whatever clip.nonfinite is"
        )
        raise
    except Exception as error:
        if config.verify.dtype == "float64" and setting.needs_float32(config, device):
            error.add_note("the model computes in float32 only: use verify.dtype=float32")
        raise
    finally:
        for sink in sinks:
            sink.close(None, 0)


def _execute(
    config: RunConfig,
    sinks: Sequence[Sink],
    make_plugin: Callable[[RunConfig], Plugin],
    device: torch.device,
) -> dict[str, Any]:
    notes = list(setting.notes(config))
    settled = setting.comparable(config)
    if device.type == "cuda" and config.verify.dtype == "float32":
        # cuDNN uses TF32 by default, which has ten bits of mantissa.
        torch.backends.cudnn.allow_tf32 = False
    compared: list[Compared] = []
    causes: dict[str, None] = {}
    for number, name in enumerate(config.verify.modes or [config.clip.mode]):
        side = _Side(settled, make_plugin(settled), name, device)
        compared += side.compare(number, sinks)
        causes |= dict.fromkeys(side.causes())
    if side.reference is not None and (dropped := side.reference.dropped):
        notes.append(f"dropout is off, in {dropped} places: ranks would drop other elements")
    return outcome(config, compared, notes, list(causes)) if compared else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's warnings about slow redistribution: speed does not matter here."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Side:
    """One mode under the plugin on this rank, and the reference on the first rank."""

    def __init__(self, config: RunConfig, plugin: Plugin, name: str, device: torch.device) -> None:
        self.config = config
        self.plugin = plugin
        self.name = name
        self.device = device
        self.losses = _Losses()
        self.steps: list[ComparedStep] = []
        self.reference: Reference | None = None
        mode, self.derived = setting.make_mode(config, name)
        first = [self.losses] if plugin.rank == 0 else []
        self.trainer: Trainer = watch.make_trainer(config, plugin, mode, *first)
        pipeline = self.trainer.model.pipeline
        self.split = BatchSplit(plugin.data_size, 1 if pipeline is None else pipeline.microbatches)

    def compare(self, number: int, sinks: Sequence[Sink]) -> list[Compared]:
        """Train both sides, and return the comparison on the first rank, [] on the others.

        Args:
            number: index of the mode among those compared.
            sinks: sinks for a row per step.
        """
        trainer, first = self.trainer, self.plugin.rank == 0
        mode = trainer.state.mode
        if self.derived:
            probe = Reference(self.config, self.split, self._mode(), self.device) if first else None
            mode.threshold = watch.from_all(probe.peak() * BINDS if probe else None)[0]
        if first:
            self.reference = Reference(
                self.config, self.split, self._mode(mode.threshold), self.device
            )

        def seen(
            ranks: list[SideMetrics], gradients: dict[str, Tensor], by_hand: list[Naive | None]
        ) -> None:
            self._take_step(ranks, gradients, by_hand)
            for sink in sinks:
                sink.write(row_of(self.steps[-1], number, mode.threshold))

        trainer.state.mode = watch.Watched(mode, trainer, seen)
        trainer.fit()
        drifted = watch.drifted(trainer.optimizer.layout)
        placed = watch.placements(trainer.optimizer.layout)
        weights = trainer.booster.state_dict(trainer.model)
        if self.reference is None:
            return []
        wanted = self.reference.weights()
        weights = {name: tensor for name, tensor in weights.items() if name in wanted}
        steps = [
            replace(step, loss=(loss, step.loss[1]))
            for step, loss in zip(self.steps, self.losses.each, strict=True)
        ]
        errors = tensor_errors(weights, wanted)
        return [Compared(self.name, mode.threshold, self.derived, steps, errors, drifted, placed)]

    def causes(self) -> Iterator[str]:
        """Yield reasons other than a fault of the plugin why the sides may differ."""
        reference = self.reference
        if reference is None:
            return
        yield from reference.causes()
        losses = next(((s.loss, s.step) for s in self.steps), None)
        ours = self.losses.each[0] if self.losses.each else math.nan
        if losses is not None and not relative(ours, losses[0][1]) <= self.config.verify.bound:
            yield (
                f"the losses of step 1 differ already ({ours!r}, one process {losses[0][1]!r}): "
                "look at the forward pass or the batches rather than at clipping"
            )
        if self.config.verify.dtype == "float32":
            yield "float32 rounds: verify.dtype=float64 tells rounding from a fault"

    def _mode(self, threshold: float | None = None) -> ClipMode:
        """Make the mode again, because a mode is bound to one layout."""
        mode, _ = setting.make_mode(self.config, self.name)
        if threshold is not None:
            mode.threshold = threshold
        return mode

    def _take_step(
        self, ranks: list[SideMetrics], gradients: dict[str, Tensor], by_hand: list[Naive | None]
    ) -> None:
        assert self.reference is not None
        number = len(self.steps) + 1
        metrics, loss, wanted = self.reference.step()
        self.steps.append(
            ComparedStep(
                step=number,
                plugin=ranks[0],
                reference=metrics,
                gradients=tensor_errors(gradients, wanted),
                disagreeing=disagreements(number, ranks),
                present=presence(number, gradients, wanted),
                naive=naive.worst(by_hand, metrics.norm),
                loss=(math.nan, loss),
            )
        )


class _Losses:
    """A sink that keeps the loss of each step."""

    def __init__(self) -> None:
        self.each: list[float] = []

    def write(self, row: Row) -> None:
        self.each.append(float(row[keys.TRAIN_LOSS]))

    def close(self, summary: dict[str, Any] | None, exit_code: int) -> None:
        pass
